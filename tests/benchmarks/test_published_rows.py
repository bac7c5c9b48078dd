"""Published rows: what is read from them, what is skipped and why, and how predictions are scored."""

from __future__ import annotations

import json
import math
import multiprocessing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import published
from benchmarks.published import Models, report, score_file
from benchmarks.published_clusters import adapter_rate, cluster_of
from benchmarks.published_flops import published_seconds
from benchmarks.published_rows import PublishedCase, case_of, read_rows
from benchmarks.published_scores import Scored, kendall, kendall_apart, kendall_b, layouts
from benchmarks.published_shape import NotExpressible
from tests.helpers.published_row import MODELS, change, made_up

ROW = made_up(
    cluster={"gpu": "A100-80GB-SXM", "n_gpus": 8, "gpus_per_node": 8, "inter": "8x HDR IB 200 Gb/s per node"},
    parallel={"t": 2, "p": 2, "d": 2, "microbatch": 1, "global_batch": 8, "recompute": "full", "zero_stage": 1},
)
changed = partial(change, ROW)


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test has traced and placed the others need not."""
    monkeypatch.setattr(published, "Models", lambda: MODELS)


def test_a_row_becomes_a_layout() -> None:
    case = case_of(ROW)
    layout = case.layout
    assert (layout.tensor, layout.pipeline, layout.data, layout.zero, layout.recompute) == (2, 2, 2, 1, "full")
    assert case.seconds == 0.05 and case.shape.vocab == 1024 and not case.shape.flash


def test_a_row_runs_in_the_schedule_that_it_names() -> None:
    for said, named in (("1F1B (DeepSpeed)", ("1f1b", 1)), ("GPipe", ("gpipe", 1)), ("zbv", ("zb-v", 2))):
        layout = case_of(changed("parallel", schedule=said)).layout
        assert (layout.schedule_name, layout.interleave) == named


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**ROW, "kind": "gemm"}, "no training step"),
        (changed("model", hidden=None), "hidden"),
        (changed("model", experts={"n": 8, "top_k": 9}), "9 of 8 experts"),
        (changed("model", attention="linear"), "linear attention"),
        (changed("model", layers="many"), "layers is 'many'"),
        (changed("model", heads=7), "256 does not divide among 7 heads"),
        (changed("parallel", d=-2), "d is -2"),
        (changed("parallel", ep=3), "expert"),
        (changed("parallel", schedule="DualPipe"), "parallel.schedule is 'DualPipe': no layout has it"),
        (changed("measured", iter_s="soon"), "measured.iter_s is 'soon', no positive number"),
        (changed("model", layers=0), "model.layers is 0, no positive whole number"),
        (changed("measured", iter_s=-1.0), "measured.iter_s is -1.0, no positive number"),
        (changed("measured", iter_s=0), "measured.iter_s is 0, no positive number"),
        (changed("measured", iter_s=float("nan")), "measured.iter_s is nan, no positive number"),
        (changed("measured", oom="no"), "measured.oom is 'no', neither true nor false"),
        ({**ROW, "measured": {"iter_ms": 50}}, "measured has iter_ms, and none of iter_s, "),
        ({**ROW, "measured": {"tflops_per_gpu": 90}}, "flops_convention is not given; one of"),
        ({**ROW, "measured": {"mfu": 0.4, "flops_convention": "8M"}}, "'8M' is not known; one of"),
        ({**changed("model", params=None), "measured": {"mfu": 0.4, "flops_convention": "8N"}}, "need model.params"),
        ({**ROW, "model": 5}, "model is 5, no JSON object"),
        ({**ROW, "cluster": None}, "the row has no 'cluster'"),
        (changed("cluster", n_gpus=64), "t 2 x p 2 x cp 1 x d 2 is not n_gpus 64"),
        (changed("parallel", d=None, p=3), "t 2 x p 3 x cp 1 x any d is not n_gpus 8"),
        (changed("cluster", n_gpus=10**400), "cluster.n_gpus is 1000.*, more than"),
        (changed("cluster", gpus_per_node="eight"), "cluster.gpus_per_node is 'eight', no positive whole number"),
        (changed("cluster", gpu=None), "cluster.gpu is not given"),
        (changed("model", experts={"n": 8}), "top_k, how many experts a token goes to, is not given"),
        (changed("model", experts=8), "top_k, how many experts a token goes to, is not given"),
        (changed("model", experts="some"), "model.experts is 'some', neither how many"),
        (changed("model", mlp="swiglu", head_dim=33), "heads of 33 are no pairs"),
        (changed("parallel", precision="int4"), "parallel.precision is 'int4': no layout has it; one of bf16"),
        (changed("parallel", recompute="some"), "parallel.recompute is 'some': no layout has it; one of none"),
        (changed("parallel", zero_stage=5), "parallel.zero_stage is 5, neither a stage"),
        (changed("parallel", sequence_parallel="false"), "sequence_parallel is 'false', neither true nor false"),
        (changed("parallel", global_batch=None), "no global batch"),
        (changed("parallel", global_batch=7), "does not divide"),
        (changed("cluster", gpu="abacus"), "no preset for abacus"),
        ({**ROW, "measured": {}}, "neither seconds"),
        (changed("parallel", optimizer="Shampoo"), "optimizer shampoo: how many moments"),
        (changed("parallel", optimizer="AdamW 8-bit"), "optimizer adamw 8-bit: how many moments"),
    ],
)
def test_what_cannot_be_priced_is_skipped_with_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotExpressible, match=reason):
        case_of(row)


@pytest.mark.parametrize(
    ("moments", "names"),
    [
        (2, (None, "", "AdamW", "adamw_torch_fused", "DeepSpeed FusedAdam", "LAMB")),
        (1, ("decoupled_lionw", "sgd, momentum=0.9", "SGD with momentum", "momentum")),
        (0, ("Adafactor", "SGD", "sgd momentum=0.0", "SGD without momentum")),
    ],
)
def test_moments_are_those_of_the_optimizer(moments: int, names: tuple[str | None, ...]) -> None:
    assert {case_of(changed("parallel", optimizer=name)).layout.moments for name in names} == {moments}


@pytest.mark.slow
def test_kernels_and_dropout_are_those_of_the_system() -> None:
    """Of several years the first counts; dropout is read, written and its result kept."""

    def asked(source: str, name: str = "175B") -> PublishedCase:
        return case_of({**ROW, "source": source, "row": name})

    old = asked("Korthikanti et al. 2022/MLSys 2023, arXiv 2205.05198")
    assert not old.shape.flash and old.shape.dropout and "input_gradient" in old.layout.overlap
    new, baseline = (asked("NSDI 2024", name) for name in ("MegaScale 256 GPUs", "Megatron-LM 256 GPUs"))
    assert new.shape.flash and not baseline.shape.flash and not new.shape.dropout
    priced = [
        MODELS.of(replace(old, shape=replace(old.shape, dropout=drops))).price(old.layout, old.cluster, old.batch)
        for drops in (False, True)
    ]
    assert priced[0].predicted.step_seconds < priced[1].predicted.step_seconds
    assert priced[0].predicted.activation_bytes <= priced[1].predicted.activation_bytes


def test_kernels_are_named_in_all_of_many_layers() -> None:
    """Layers themselves run operation by operation, those with numbers of two digits too."""
    row = changed("model", layers=12)
    case = case_of({**row, "parallel": {**row["parallel"], "attention_kernel": "flash_attention2"}})
    named = MODELS.of(case).price(case.layout, case.cluster, case.batch)
    fused = replace(case.layout, eager=())
    assert named.predicted.step_seconds > MODELS.of(case).price(fused, case.cluster, case.batch).predicted.step_seconds


def test_experts_are_divided_among_tensor_and_data_ranks() -> None:
    row = changed("model", experts={"n": 8, "top_k": 2, "ffn": 128, "shared": 1}, dense_layers=1)
    row["parallel"] = {**ROW["parallel"], "ep": 4, "capacity_factor": 1.25}
    case = case_of(row)
    assert (case.layout.expert, case.layout.capacity) == (2, 1.25)
    assert case.shape.experts is not None and case.shape.experts.dense == 1
    assert case_of({**row, "parallel": {**row["parallel"], "ep": 2, "etp": 2}}).layout.expert == 2


def test_files_never_seen_are_priced(tmp_path: Path) -> None:
    path = tmp_path / "new.jsonl"
    rows = [ROW, {**ROW, "kind": "collective"}, {**changed("parallel", t=1, d=4), "measured": {"oom": True}}]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = report([path])["files"]["new"]
    assert (found["priced"], found["timed"], len(found["skipped"])) == (2, 1, 1)
    assert found["fits_judged"] == 2 and found["fits_right"] == 0.5
    assert found["ran_but_said_too_big"] == sum(not one["fits"] and not one["published_oom"] for one in found["rows"])


def test_whatever_a_file_holds_the_other_rows_are_priced(tmp_path: Path) -> None:
    """Each field of a row dropped, or exchanged for something it cannot be: a price or a reason, never an error."""
    strange: list[Any] = [None, "?", -1, 0, 1.5, [], {"a": 1}, True, 10**9]
    lines = ["{", "[1]", "7", json.dumps(ROW)]
    for part in ("model", "cluster", "parallel", "measured"):
        for field in ROW[part]:
            rest = {name: value for name, value in ROW[part].items() if name != field}
            lines.append(json.dumps({**ROW, part: rest}))
            lines += [json.dumps(changed(part, **{field: value})) for value in strange]
    lines.append("[" * 100_000)
    path = tmp_path / "strange.jsonl"
    path.write_bytes(b"\xff\n" + "\n".join(lines).encode())
    rows = list(read_rows(path))
    assert len(rows) == len(lines) + 1
    for row in rows:
        if isinstance(row, NotExpressible):
            continue
        try:
            case_of(row)
        except NotExpressible as reason:
            assert str(reason) and "Error" not in str(reason)
    scored, skipped = score_file(tmp_path / "absent.jsonl", MODELS)
    assert not scored and "cannot be read" in skipped[0].reason
    (tmp_path / "empty.jsonl").write_text("\n")
    scored, skipped = score_file(tmp_path / "empty.jsonl", MODELS)
    assert not scored and skipped[0].reason == "the file has no rows"


@pytest.mark.slow
def test_keys_that_several_queries_share_need_no_fused_kernel() -> None:
    """Each is repeated for its queries, so that scores cost as much as with keys of their own."""
    own, shared = (case_of(changed("model", kv_heads=heads)) for heads in (4, 2))
    assert not shared.shape.flash
    priced = [MODELS.of(one).price(one.layout, one.cluster, one.batch).flops for one in (own, shared)]
    fewer = 4 * 2 * (256 * 128) * 3 * 2 * (8 * 128)  # layers x matrices x halves x passes x 2 x tokens
    assert priced[0] - priced[1] == pytest.approx(fewer)


def test_what_describes_a_row_may_be_missing_or_anything(tmp_path: Path) -> None:
    """No name, no source, or ones that are no words; a line with a character that ends lines elsewhere; a byte order
    mark."""
    nameless = {name: value for name, value in ROW.items() if name not in ("id", "row", "source")}
    rows = [nameless, {**ROW, "row": 3, "id": [1]}, {**ROW, "source": ["a", "b"]}, {**ROW, "notes": "one\u2028two"}]
    path = tmp_path / "bare.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8-sig")
    found = report([path])["files"]["bare"]
    assert (found["priced"], found["skipped"]) == (4, [])
    assert [row["id"] for row in found["rows"]] == ["row 1", "[1]", "made up", "made up"]


def test_files_of_one_name_are_told_apart_and_none_counts_twice(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("held", "known")]
    for folder in folders:
        folder.mkdir()
    one, other = (_file(folder, "rows", 1.0) for folder in folders)
    found = report([one, other, one])
    assert list(found["files"]) == [str(one), str(other)] and found["overall"]["priced"] == 2


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        ("4x Omni-Path 100 Gb/s per node (50 GB/s per node, 6.25 GB/s per GPU)", 6.25),
        ("8x HDR IB 200 Gb/s per node", 25.0),
        ("RDMA 400 Gb/s per GPU", 50.0),
        ("25 Gb/s Ethernet per node", 25 / 64),
        ("1600 Gb/s per node RoCE", 25.0),
        ("not stated", None),
    ],
)
def test_networks_are_read(text: str, gigabytes: float | None) -> None:
    found = adapter_rate(text, 8)
    assert found == (None if gigabytes is None else pytest.approx(gigabytes * 1e9))


def test_fewer_links_inside_a_node_are_slower() -> None:
    whole, half = cluster_of(ROW), cluster_of(changed("cluster", intra="NVLink3 (6 inter-gpu connects)"))
    assert half.links[0].bandwidth == pytest.approx(whole.links[0].bandwidth / 2)


def test_less_power_is_a_lower_clock() -> None:
    whole, capped, more = (cluster_of(changed("cluster", power_W=watts)).device for watts in (400, 200, 500))
    assert capped.sustained == pytest.approx(whole.sustained * 0.5 ** (1 / 3)) and more == whole


def test_flops_follow_the_convention() -> None:
    """Equation 3 of Narayanan et al. 2021: 96 B s l h^2 (1 + s / 6h + V / 16 l h)."""
    row = {**ROW, "measured": {"tflops_per_gpu": 1.0, "flops_convention": "megatron_hw_full"}}
    work = 96 * 8 * 128 * 4 * 256**2 * (1 + 128 / (6 * 256) + 1000 / (16 * 4 * 256))
    assert published_seconds(row) == pytest.approx(work / 8e12)


def test_what_is_known_of_systems_goes_into_their_rows() -> None:
    """Aleph Alpha's library, and DeepSpeed on Jean Zay: who stands still while messages travel, what is reduced, where
    layers are cut, what the network carries."""
    hagemann = case_of({**ROW, "source": "Hagemann et al. 2023"})
    assert (hagemann.layout.embedding_as_layers, hagemann.layout.head_as_layers, hagemann.layout.reduction) == (
        1,
        2,
        "all-fp32",
    )
    assert "message" not in hagemann.layout.overlap and not hagemann.layout.scatter
    (outer,) = hagemann.cluster.links[1:]
    assert outer.rates["message"][0].bandwidth > 3 * outer.bandwidth
    jean_zay = changed("cluster", inter="4x Omni-Path 100 Gb/s per node", n_gpus=320)
    jean_zay["source"] = "BigScience tr11-176B chronicles-prequel.md"
    jean_zay["parallel"] = {**ROW["parallel"], "d": 80, "global_batch": 80, "schedule": "1f1b (DeepSpeed)"}
    few, fp16 = case_of(jean_zay), changed("parallel", precision="fp16", schedule="1f1b (DeepSpeed)")
    assert "message" not in few.layout.overlap and few.layout.embedding_as_layers == 0
    assert few.cluster.device.launch_seconds > cluster_of(ROW).device.launch_seconds
    assert few.cluster.links[1].bandwidth < 0.5 * few.cluster.links[1].rates["message"][0].bandwidth
    assert few.layout.gradients == "fp32" and case_of(fp16).layout.gradients == "own"
    balanced = case_of({**jean_zay, "notes": "embedding-balanced stages"}).layout
    assert (balanced.embedding_as_layers, balanced.head_as_layers) == (1, 1)


def test_zero_3_of_2021_is_that_of_one_paper() -> None:
    for name, source, gathers in (
        ("ZeRO-3 175B", "Narayanan et al., SC 2021", "tensor"),
        ("ZeRO-3 8B", "somebody 2025", "layer"),
        ("PTD-P 175B", "Narayanan et al., SC 2021", "layer"),
    ):
        assert case_of({**ROW, "source": source, "row": name}).layout.gathers == gathers


@pytest.mark.parametrize(
    ("said", "priced"),
    [
        ("minimal", "elementwise"),
        ("minimal_offloaded", "elementwise"),
        ("qkv_proj_offloaded", "full"),
        ("full", "full"),
        (None, "none"),
    ],
)
def test_policies_of_maxtext_are_the_nearest_that_layouts_have(said: str | None, priced: str) -> None:
    row = changed("parallel", recompute=said, p=1, d=4, microbatch=None)
    row |= {"source": "MaxText", "model": {"seq": 128, "global_parameter_scale": 1}}
    layout = case_of(row).layout
    assert (layout.recompute, layout.microbatch) == (priced, 2)
    row["parallel"]["microbatch"] = 1
    assert case_of(row).layout.microbatch == 1


def test_models_are_in_the_dtype_of_their_rows() -> None:
    for precision, nbytes in (("fp32", 4), ("fp8", 2)):
        row = changed("parallel", precision=precision)
        row["cluster"] = {**ROW["cluster"], "gpu": "H100-80GB-SXM"}
        case = case_of(row)
        sections = MODELS.of(case).sections(case.layout, case.cluster)
        assert {weight.itemsize for section in sections.every for weight in section.weights} == {nbytes}


def test_kernels_of_attention_are_those_of_their_time() -> None:
    first = cluster_of({**ROW, "source": "MosaicML llm-foundry"}).device
    assert first.attention_width == 0
    flops = cluster_of(ROW).device
    with_heads_of_128 = flops.attention_efficiency / (1 + flops.attention_width / 128)
    assert first.attention_efficiency == pytest.approx(0.57 * with_heads_of_128)


def test_a_layout_measured_several_times_is_one() -> None:
    rows = [(1, 5.0), (1, 5.0), (1, 8.0), (2, 6.0), (4, 4.0)]
    scored = [
        Scored(str(i), "made up", case, cast(Any, SimpleNamespace(predicted=SimpleNamespace(step_seconds=size))))
        for i, (size, seconds) in enumerate(rows)
        for case in [case_of({**changed("parallel", microbatch=size), "measured": {"iter_s": seconds}})]
    ]
    assert layouts(scored) == [(1, 5.0), (2, 6.0), (4, 4.0)]


def test_kendall() -> None:
    assert kendall([(1, 1), (2, 2), (3, 3)]) == 1.0
    assert kendall([(1, 3), (2, 2), (3, 1)]) == -1.0
    assert kendall([(1, 1), (2, 3), (3, 2)]) == pytest.approx(1 / 3)


def test_kendall_without_what_cannot_be_ordered() -> None:
    assert kendall_b([(1, 1), (1, 1), (2, 2)]) == pytest.approx(1.0)
    assert kendall_b([(1, 1), (1, 2), (2, 3)]) == pytest.approx(2 / math.sqrt(6))
    assert kendall_apart([(1, 1.0), (2, 1.005), (3, 2.0)], 0.01) == 1.0
    assert kendall_apart([(2, 1.0), (1, 1.005), (3, 2.0)], 0.01) == 1.0
    assert kendall_apart([(2, 1.0), (1, 1.005), (3, 2.0)], 0.001) == pytest.approx(1 / 3)
    assert kendall_apart([(1, 1.0), (2, 1.0)], 0.01) is None


def test_errors_of_files_left_out_of_the_fit(tmp_path: Path) -> None:
    """Two files of one device, the second measured twice as slow: each is predicted with the speed of the other."""
    found = report([_file(tmp_path, "quick", 1.0), _file(tmp_path, "slow", 2.0)])
    (quick, slow) = found["left_out"]["files"]
    assert quick["mean_absolute_error"] == pytest.approx(1.0) and slow["mean_absolute_error"] == pytest.approx(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_files_priced_in_several_processes(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each traces for itself; those of the fork server need not import torch first."""
    monkeypatch.setattr(published, "Models", Models)
    context = multiprocessing.get_context(start)
    context.set_forkserver_preload(["benchmarks.published"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    files = [_file(tmp_path, name, 1.0) for name in ("one", "other")]
    files.append(tmp_path / "absent.jsonl")
    alone, apart = report(files), report(files, jobs=2)
    assert {**alone, "seconds": 0} == {**apart, "seconds": 0}


def _file(folder: Path, name: str, seconds: float) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text(json.dumps({**ROW, "measured": {"iter_s": seconds}}))
    return path
