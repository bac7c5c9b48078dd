"""Rows that leave their layout open: what they allow, what is chosen of it, and what sources say elsewhere."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import published
from benchmarks.emulator.space import Space, candidates
from benchmarks.published import price_row, report
from benchmarks.published_flops import CONVENTIONS
from benchmarks.published_known import completed
from benchmarks.published_open import METHODS, solution
from benchmarks.published_rows import PublishedCase, case_of
from benchmarks.published_shape import NotExpressible
from tests.helpers.published_row import MODELS, change, made_up

ROW = made_up(
    cluster={"gpu": "V100-16GB", "n_gpus": 4, "gpus_per_node": 8, "inter": "25 Gb/s Ethernet per node"},
    parallel={"method": "system.auto", "global_batch": 64, "recompute": "full", "precision": "fp16"},
)
# Few ways to divide: what a test prices one by one.
SMALL = change(change(ROW, "cluster", n_gpus=2), "parallel", global_batch=8)
changed = partial(change, ROW)


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test has traced and placed the others need not."""
    monkeypatch.setattr(published, "Models", lambda: MODELS)


def tried(case: PublishedCase, layers: int = 4) -> list[Any]:
    assert case.space is not None
    like, space = case.layout, case.space
    return list(candidates(case.devices, case.batch, layers, 4, 0, like, space))


@pytest.mark.parametrize("method", METHODS)
def test_every_layout_of_a_method_is_one_that_it_allows(method: str) -> None:
    found = tried(case_of(changed("parallel", method=f"alpa.{method}")))
    allowed = METHODS[method].space
    assert found and len(set(found)) == len(found)
    for layout in found:
        assert layout.devices == 4 and layout.recompute == "full" and layout.precision == "fp16"
        for name in ("tensor", "pipeline", "data"):
            assert not getattr(allowed, name) or getattr(layout, name) in getattr(allowed, name)
        assert layout.data == 1 or layout.zero in allowed.zero
    assert {layout.pipeline for layout in found} == (
        {1, 2, 4} if not allowed.pipeline else {1}
    ) or method == "inter_only"


def test_the_best_that_fits_is_chosen_and_said(tmp_path: Path) -> None:
    path = tmp_path / "new.jsonl"
    said = ({"method": "zero_2", "microbatch": 4}, {"t": 1, "p": 2, "microbatch": 4})
    rows = [SMALL, *(change(SMALL, "parallel", **parallel) for parallel in said)]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = report([path])["files"]["new"]
    best, given, whole = found["rows"]
    assert {"tensor", "pipeline", "data", "microbatch", "zero"} >= set(best["chosen"]) >= {"tensor", "microbatch"}
    assert best["fits"] and f"microbatch={best['chosen']['microbatch']}" in best["layout"]
    assert given["chosen"] == whole["chosen"] == {}
    assert best["predicted_seconds"] <= min(given["predicted_seconds"], whole["predicted_seconds"])
    assert (found["timed"], found["open"]["timed"], found["given"]["timed"]) == (3, 1, 2)


def test_no_layout_that_fits_is_quicker_by_our_prices() -> None:
    case = case_of(change(SMALL, "parallel", method="megatron"))
    best, _ = price_row(case, MODELS)
    for layout in tried(case)[::3]:
        priced = MODELS.of(case).price(layout, case.cluster, case.batch)
        assert priced.predicted.step_seconds >= best.predicted.step_seconds * (1 - 1e-9) or not priced.fits


def test_where_no_layout_divides_the_model_the_reason_is_said(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    row = changed("parallel", t=2, p=1, method=None)
    rows = [change(row, "model", experts={"n": 7, "top_k": 1}), change(row, "parallel", global_batch=7)]
    path.write_text("\n".join(map(json.dumps, rows)))
    experts, batch = (one["reason"] for one in report([path])["files"]["odd"]["skipped"])
    assert "has 7 experts, which do not divide among 2 tensor ranks; tensor=1 and tensor=7 do" in experts
    assert "divides 4 layers and a batch of 7 among 4 devices" in batch


@pytest.mark.slow
def test_where_nothing_fits_the_leanest_is_priced() -> None:
    row = change(SMALL, "model", layers=24, hidden=4096, heads=32, params=5e9)
    priced, chosen = price_row(case_of({**row, "measured": {"oom": True}}), MODELS)
    assert not priced.fits and priced.layout.microbatch == 1 and "microbatch" in chosen


def test_chunks_that_were_not_counted_are_more_than_one() -> None:
    row = changed("parallel", method=None, t=1, p=2, d=2, microbatch=1, schedule="interleaved-1f1b")
    assert {layout.interleave for layout in tried(case_of(row), layers=8)} == {2, 3, 4}


def test_a_count_of_microbatches_says_their_size() -> None:
    found = tried(case_of(changed("parallel", n_microbatches=8)))
    assert found and {layout.microbatches(64) for layout in found} == {8}


@pytest.mark.parametrize(
    ("text", "degrees"),
    [
        ("1 stage (1,1)", {"pipeline": 1, "data": 1, "tensor": 1}),
        ("2 stages of (1,2), dp2", {"pipeline": 2, "data": 2, "tensor": 1}),
        ("16 stages (1,4) logical (1,4): op4", {"pipeline": 16, "data": 1, "tensor": 4}),
        ("4 stages (2,8), op4", {"pipeline": 4, "data": 4, "tensor": 4}),
        ("4 stages (1,8)", {"pipeline": 4}),
        ("3 stages (1,2), (1,2), (1,4)", {}),
        ("?", {}),
    ],
)
def test_solutions_are_read(text: str, degrees: dict[str, int]) -> None:
    assert solution({"solution": text}) == degrees


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (changed("parallel", method="magic"), "method magic"),
        (changed("cluster", n_gpus=None), "n_gpus"),
        (changed("parallel", global_batch=7, microbatch=4), "no layout that the row allows"),
        (changed("parallel", method="inter_only", p=3), "no layout that the row allows"),
        ({**ROW, "source": "Alpa OSDI 2022", "row": "wresnet auto n=4"}, "no decoder of text"),
        ({**ROW, "source": "MaxText", "cluster": {**ROW["cluster"], "slices": 2}}, "several slices"),
    ],
)
def test_what_no_layout_expresses_is_skipped_with_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotExpressible, match=reason):
        price_row(case_of(row), MODELS)


def test_what_sources_say_elsewhere_is_filled_in() -> None:
    """The ablation's dims give the count of parameters that its rows have; MaxText's scale gives its."""
    for family, devices, params in (("gpt", 4, 1715856000), ("moe", 2, 1901440000)):
        row = {**ROW, "source": "Alpa OSDI 2022 artifact", "table": "results_intra_ablation.tsv"}
        row |= {"row": f"{family} parax.auto_sharding n={devices} #2", "model": {}}
        row |= {"cluster": {**ROW["cluster"], "n_gpus": devices}, "parallel": {"method": "parax.auto_sharding", "p": 1}}
        case = case_of(row)
        assert parameters(case) == pytest.approx(params, rel=0.005)
        assert case.batch == 8 and case.layout.precision == "fp16"
        if family == "gpt":
            assert {(one.data, one.tensor, one.microbatch) for one in tried(case)} == {(2, 2, 4)}
    scaled = completed(
        {**ROW, "source": "MaxText", "model": {"seq": 2048, "global_parameter_scale": 32}, "parallel": SLICE}
    )
    dims = [scaled["model"][name] for name in ("layers", "hidden", "heads", "ffn")]
    assert dims == [32, 8192, 64, 28672] and scaled["parallel"]["microbatch"] == 24
    assert CONVENTIONS["6N+causal"](scaled["model"], 1.0) == pytest.approx(6 * 31.7e9, rel=0.02)


SLICE = {"t": 4, "p": 1, "d": 16, "per_device_batch": 6, "global_batch": 384}


def parameters(case: PublishedCase) -> float:
    """As Alpa counts them: with biases, the embedding's table once."""
    shape = case.shape
    dense, count = 4 * shape.hidden**2, shape.experts.number if shape.experts else 1
    mlp = 2 * shape.hidden * shape.ffn
    return shape.layers * (dense + mlp * (1 + count) / 2) + shape.vocab * shape.hidden


def test_mixtures_of_alpa_are_counted_as_there() -> None:
    """Two rows of its artifact that have seconds and TFLOP/s: 16 experts, batches of 1024 sequences of 1024."""
    dims = {"seq": 1024, "vocab": 32000, "experts_every_other_layer": 16, "expert_group_size": 2048}
    for layers, devices, seconds, rate in ((8, 2, 19.3906, 40.7499), (16, 4, 20.0282, 37.5233)):
        model = {**dims, "layers": layers, "hidden": 768, "ffn": 8 * 768}
        counted = CONVENTIONS["alpa_moe_remat"](model, 1024 * 1024)
        assert counted == pytest.approx(seconds * rate * devices * 1e12, rel=1e-3)


@pytest.mark.slow
def test_masks_that_bring_tokens_to_slots_are_priced() -> None:
    """Of a group of S tokens each chooses among 2 S slots: two products forward, three backward, none for the masks
    that send tokens out."""
    row = changed("model", experts={"n": 8, "top_k": 2}, ffn=512, mlp="gelu", expert_group_size=256)
    row["parallel"] = {**ROW["parallel"], "t": 1, "p": 1, "microbatch": 4}
    grouped = case_of(row)
    plain = case_of({**row, "model": {**row["model"], "expert_group_size": None}})
    assert grouped.sweep == plain.sweep and grouped.shape != plain.shape
    with_masks, without = (price_row(case, MODELS)[0] for case in (grouped, plain))
    tokens, layers = 64 * 128, 4
    assert with_masks.flops - without.flops == pytest.approx(5 * 2 * tokens * 2 * 256 * 256 * layers, rel=0.01)
    assert with_masks.predicted.step_seconds > without.predicted.step_seconds


def test_methods_of_one_sweep_may_run_the_model_differently() -> None:
    """Megatron's runs drop out, Alpa's do not; DeepSpeed's groups are its microbatches."""
    row = {**changed("model", experts_every_other_layer=4, top_k=2, expert_group_size=512), "source": "Alpa OSDI 2022"}
    auto, deepspeed = (
        case_of({**row, "row": f"moe {name} n=4", "parallel": {**ROW["parallel"], "method": name}})
        for name in ("auto", "deepspeed")
    )
    assert deepspeed.shape.dropout and not auto.shape.dropout and auto.sweep == deepspeed.sweep
    assert (auto.layout.moments, deepspeed.layout.moments) == (0, 2)
    assert deepspeed.layout.microbatch == 8
    assert deepspeed.row["model"]["expert_group_size"] == 8 * 128
    assert auto.layout.allocation == "static" and auto.layout.cuts == "operations"


def test_an_adapter_that_a_node_shares_is_whole_for_one_of_its_devices() -> None:
    (outer,) = case_of(ROW).cluster.links[1:]
    assert outer.adapters == 1 and outer.bandwidth == pytest.approx(0.95 * 25e9 / 8)
    a100 = case_of(changed("cluster", gpu="A100-80GB", inter="8x HDR IB 200 Gb/s per node")).cluster
    assert a100.links[1].adapters == 8


def test_dense_models_of_alpa_are_counted_as_there() -> None:
    model = {"layers": 24, "hidden": 1536, "seq": 1024, "vocab": 51200}
    assert CONVENTIONS["alpa_remat"](model, 1024 * 1024) == pytest.approx(2 * 58.922 * 57.9437e12, rel=1e-3)


def test_fields_may_be_anything(tmp_path: Path) -> None:
    strange: list[Any] = [None, "?", -1, 0, 1.5, [], {"a": 1}, True, 10**9]
    for source in ("nobody 2021", "Alpa OSDI 2022 artifact", "MaxText", "Megatron-Core r0.8.0 H100"):
        for part, fields in (
            (
                "parallel",
                (*ROW["parallel"], "t", "p", "d", "ep", "solution", "n_microbatches", "schedule", "zero_stage"),
            ),
            ("model", (*ROW["model"], "experts_every_other_layer", "expert_group_size", "global_parameter_scale")),
            ("cluster", (*ROW["cluster"], "slices")),
        ):
            for field in fields:
                for value in strange:
                    try:
                        case_of({**changed(part, **{field: value}), "source": source})
                    except NotExpressible as reason:
                        assert str(reason)


def test_a_space_restricts_what_planning_tries() -> None:
    every, few = (list(candidates(8, 64, 8, 8, 0, space=space)) for space in (Space(), Space(tensor=(2,), zero=(2, 3))))
    assert {layout.tensor for layout in few} == {2} and {one.zero for one in few if one.data > 1} == {2, 3}
    kept = [layout for layout in every if layout.tensor == 2]
    assert {str(one).replace("zero=1", "") for one in kept} >= {
        str(one).replace("zero=2", "") for one in few if one.zero == 2
    }
