"""What trainers do beside training is in the predicted seconds of their rows, and of no others."""

from __future__ import annotations

import pytest

from autopar.cluster.description import Cluster
from benchmarks.published import price_row
from benchmarks.published_beside import rows_seconds, sharded_bytes, stall_of_a_byte
from benchmarks.published_rows import case_of
from benchmarks.published_scores import Scored
from benchmarks.published_shape import Experts
from tests.helpers.published_row import MODELS, change, made_up

ROW = made_up(cluster={"gpu": "A100-80GB-SXM", "n_gpus": 8}, parallel={"t": 1, "p": 1, "d": 8, "global_batch": 16})


def test_composers_metrics_read_and_write_the_logits_of_each_rank() -> None:
    other, theirs = (case_of({**ROW, "source": source}) for source in ("others 2023", "MosaicML llm-foundry 2023"))
    logits = 16 * 128 * theirs.shape.vocab / 8
    assert other.beside_seconds == 0.0
    assert theirs.beside_seconds == pytest.approx(2 * 14 * logits / theirs.cluster.device.memory_bandwidth)
    scored = Scored("one", "file", theirs, *price_row(theirs, MODELS))
    assert scored.predicted == scored.priced.predicted.step_seconds + theirs.beside_seconds
    assert scored.flops_per_second < scored.priced.flops_per_second
    assert scored.to_json()["parts"]["beside"] == theirs.beside_seconds


def test_zero_3_of_2021_stalls_for_each_byte_that_it_gathers_or_reduces() -> None:
    # 52e9 parameters: 37.8 s a step before, 22.0 after, 8.8 of the difference the network's, by hand.
    assert stall_of_a_byte() == pytest.approx(7.0 / 416e9, rel=0.01)
    row = change(ROW, "parallel", zero_stage=3, recompute="full", microbatch=1)
    theirs = case_of({**row, "source": "Narayanan et al., SC 2021", "row": "ZeRO-3 small"})
    others = [{**row, "source": "Narayanan et al., SC 2021", "row": "PTD-P small"}, {**row, "row": "ZeRO-3 small"}]
    assert [case_of(other).beside_seconds for other in others] == [0.0, 0.0]
    # Two microbatches; weights of 4e6 parameters gathered three times and reduced once, in 16 bits.
    assert theirs.beside_seconds == pytest.approx(2 * 4 * 8e6 * stall_of_a_byte())
    assert sharded_bytes(1.0, recomputes=False) == 6.0


def test_experts_of_gpt_oss_clamp_and_add_biases_by_operations_of_their_own() -> None:
    """108 bytes of an element forward and backward, by hand; 16 more where the activation is computed again."""
    h100, experts = Cluster.get("dgx-h100"), Experts(128, 4, 2880)

    def seconds(name: str, said: Experts | None = experts) -> float:
        row = {**ROW, "source": "Megatron-Bridge performance summary", "row": name}
        return rows_seconds(row, h100, said, 2880, 1000.0)

    of_a_byte = 1000 * 2880 / h100.device.memory_bandwidth
    assert seconds("GPT OSS 120B GB300 x64 BF16 GBS1280") == pytest.approx((36 + 4 + 68) * of_a_byte)
    for device in ("H100", "B200", "GB200"):
        assert seconds(f"GPT OSS 120B {device} x64 BF16") == pytest.approx((52 + 4 + 68) * of_a_byte)
    assert seconds("GPT OSS 120B B300 x64 MXFP8") == pytest.approx((36 + 4 + 68) * of_a_byte)
    assert seconds("GPT OSS 120B GB300 x64 MXFP8") == seconds("Qwen3_30B_a3B B200 x8 BF16") == 0.0
    assert seconds("GPT OSS 120B GB300 x64 BF16", None) == 0.0


def test_rows_are_counted_in_all_blocks() -> None:
    row = change(ROW, "model", experts={"n": 8, "top_k": 2, "ffn": 128}, mlp="swiglu")
    theirs = case_of({**row, "source": "Megatron-Bridge performance summary", "row": "GPT OSS small GB300 x8 BF16"})
    of_a_byte = 16 * 128 * 2 * 4 / 8 / theirs.cluster.device.memory_bandwidth
    assert theirs.beside_seconds == pytest.approx((40 * 128 + 68 * 256) * of_a_byte)
