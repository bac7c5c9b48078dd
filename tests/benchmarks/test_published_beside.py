"""What trainers do beside training is in the predicted seconds of their rows, and of no others."""

from __future__ import annotations

import pytest

from autopar.cluster.description import Cluster
from benchmarks.emulator.sections.experts import BETWEEN
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


EXPERTS = Experts(128, 4, 2880)


def beside(name: str, release: str = "26.04", said: Experts | None = EXPERTS) -> float:
    """In bytes of an element of 1000 rows, by the bandwidth of kernels between products."""
    row = {**ROW, "source": f"Megatron-Bridge performance summary ({release} NeMo Container)", "row": name}
    seconds = rows_seconds(row, Cluster.get("dgx-h100"), said, 2880, 1000.0)
    return seconds * BETWEEN * Cluster.get("dgx-h100").device.memory_bandwidth / (1000 * 2880)


def test_experts_of_gpt_oss_clamp_and_add_biases_by_operations_of_their_own() -> None:
    """108 bytes of an element forward and backward, by hand, and 10 where gradients of the halves are joined; 16 and 6
    more where the activation is computed again."""
    assert beside("GPT OSS 120B GB300 x64 BF16 GBS1280") == pytest.approx(36 + 4 + 68 + 10)
    for device in ("H100", "B200", "GB200"):
        assert beside(f"GPT OSS 120B {device} x64 BF16") == pytest.approx(52 + 4 + 68 + 10 + 6)
    assert beside("GPT OSS 120B B300 x64 MXFP8") == pytest.approx(36 + 4 + 68 + 10)
    assert beside("GPT OSS 120B GB300 x64 BF16", said=None) == 0.0


def test_mixtures_join_gradients_of_halves_unless_a_kernel_has_the_block() -> None:
    assert beside("Qwen3_30B_a3B B200 x8 BF16") == beside("DeepSeekV3 GB300 x256 MXFP8") == pytest.approx(10)
    for name in ("Qwen3_30B_a3B GB300 x8", "GPT OSS 120B GB300 x64", "DeepSeekV3 GB200 x256"):
        assert beside(f"{name} MXFP8", "26.06") == 0.0
    assert beside("DeepSeekV3 B200 x256 MXFP8", "26.06") == pytest.approx(10)
    assert rows_seconds({**ROW, "row": "mixture"}, Cluster.get("dgx-h100"), Experts(8, 2, 128), 64, 1000.0) == 0.0


def test_rows_are_counted_in_all_blocks() -> None:
    row = change(ROW, "model", experts={"n": 8, "top_k": 2, "ffn": 128}, mlp="swiglu")
    theirs = case_of({**row, "source": "Megatron-Bridge performance summary", "row": "GPT OSS small GB300 x8 BF16"})
    of_a_byte = 16 * 128 * 2 * 4 / 8 / theirs.cluster.device.memory_bandwidth / BETWEEN
    assert theirs.beside_seconds == pytest.approx((50 * 128 + 68 * 256) * of_a_byte)


def test_normalised_heads_are_read_and_written_once_more() -> None:
    """Of 16 sequences of 128 tokens, on eight devices, in four layers: four heads of 64, queries and keys."""
    row = {**change(ROW, "model", mlp="swiglu"), "source": "Megatron-Bridge performance summary", "row": "Qwen3 B200"}
    theirs, others = (case_of(each) for each in (row, {**row, "source": "others"}))
    elements = 16 * 128 / 8 * 4 * 2 * 4 * 64
    assert theirs.beside_seconds == pytest.approx(8 * elements / theirs.cluster.device.memory_bandwidth)
    assert theirs.shape.normed_heads and others.beside_seconds == 0.0
