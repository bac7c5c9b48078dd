"""What the recipes of NeMo's published rows say beyond the rows."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.published_recipes import recomputed
from benchmarks.published_rows import case_of
from benchmarks.published_systems import system
from tests.helpers.published_row import made_up

ROW = made_up(cluster={"gpu": "A100-80GB-SXM", "n_gpus": 8}, parallel={"t": 2, "p": 2, "d": 2, "global_batch": 16})


def mixture(row: str, release: str, **parallel: object) -> dict[str, Any]:
    """A row of NeMo's tables as they are written: 61 layers with 16 experts in all."""
    return {
        **ROW,
        "source": f"Megatron-Bridge performance summary ({release} NeMo Container)",
        "row": row,
        "model": {**ROW["model"], "layers": 61, "experts": {"n": 16, "top_k": 2}, "vocab": 1000},
        "cluster": {"gpu": "GB200-NVL72", "n_gpus": 64, "gpus_per_node": 72},
        "parallel": {"t": 1, "p": 4, "ep": 16, "microbatch": 1, "global_batch": 64, "precision": "mxfp8", **parallel},
    }


def test_recipes_say_more_of_mixtures_than_rows() -> None:
    new, old = (
        case_of(mixture("DeepSeekV3 GB200 x256 MXFP8", release, interleave=4)) for release in ("26.06", "26.04")
    )
    assert new.layout.cuda_graphs == ("*",) and "expert" in new.layout.overlap
    assert "*" not in old.layout.cuda_graphs and "expert" not in old.layout.overlap
    # 16 chunks of four layers, but the last of one: the head and the second token take the place of three.
    assert (new.shape.beyond, new.layout.embedding_as_layers, new.layout.head_as_layers) == (1, 0, 3)
    pairs = case_of(mixture("Kimi_K2 GB200 x256 MXFP8", "26.06", interleave=8))
    assert (pairs.shape.beyond, pairs.layout.embedding_as_layers, pairs.layout.head_as_layers) == (0, 1, 2)


@pytest.mark.parametrize(
    ("device", "release", "dispatch", "beside"),
    [
        ("GB200", "26.02", "rows", False),
        ("GB200", "26.04", "tokens", True),
        ("GB200", "26.04.01", "rows", True),
        ("B200", "26.04", "tokens", False),
        ("B200", "26.04.01", "rows", False),
        ("B300", "26.04.01", "tokens", False),
        ("GB300", "26.04", "rows", False),
        ("H100", "26.04", "rows", False),
    ],
)
def test_releases_sent_rows_of_gpt_oss_one_way_or_the_other(
    device: str, release: str, dispatch: str, beside: bool
) -> None:
    layout = case_of(mixture(f"GPT OSS 120B {device} x64 BF16 GBS1280", release, precision="bf16")).layout
    assert (layout.dispatch, "expert" in layout.overlap) == (dispatch, beside)


def test_kernels_of_gpt_oss_have_rates_of_their_own() -> None:
    def layout(row: str, release: str = "26.06", **parallel: str) -> Any:
        return case_of(mixture(row, release, **parallel)).layout

    racks = [layout(f"GPT OSS 120B {device} x64 MXFP8 GBS1280") for device in ("GB200", "GB300")]
    assert all(one.fp8_head and one.attention_rates(False)[1] < 1 for one in racks)
    board = layout("GPT OSS 120B B300 x64 MXFP8 GBS1280")
    bf16 = layout("GPT OSS 120B GB300 x64 BF16 GBS1280", "26.04", precision="bf16")
    assert board.attention == bf16.attention and not board.fp8_head and bf16.attention_rates(False) is None
    # Its backward computes all keys in MXFP8, but only those of the window in bf16.
    assert racks[1].attention_rates(True)[1] < bf16.attention_rates(True)[1] / 4
    slow = layout("GPT OSS 120B GB200 x64 MXFP8 GBS1280", "26.06.01")
    assert slow.activation_gradient > 8 and racks[0].activation_gradient == 1.0
    others = [layout(f"{name} GB200 x64 MXFP8 GBS1280", "26.06.01") for name in ("Qwen3_30B_a3B", "DeepSeekV3")]
    assert [(one.attention, one.fp8_head, one.activation_gradient) for one in others] == [((), False, 1.0)] * 2


def test_configurations_of_models_say_what_rows_leave_out() -> None:
    """Groups of DeepSeek's experts, Qwen3's normalised heads, GPT-OSS's biases, and positions that scale."""
    cases = {
        name: case_of(mixture(f"{name} GB200 x64 BF16", "26.06", precision="bf16"))
        for name in ("DeepSeekV3", "Qwen3_30B_a3B", "GPT OSS 120B")
    }
    said = {
        name: (
            *(one.layout.expert_groups, one.layout.chosen_groups, one.layout.eager),
            *(one.shape.normed_heads, one.shape.attention_bias),
        )
        for name, one in cases.items()
    }
    assert said == {
        "DeepSeekV3": (8, 4, (), False, False),
        "Qwen3_30B_a3B": (0, 0, (), True, False),
        "GPT OSS 120B": (0, 0, ("*.rotary",), False, True),
    }


@pytest.mark.parametrize(("device", "are_graphs"), [("GB200", False), ("GB300", True), ("B300", True), ("B200", False)])
def test_modules_of_gpt_oss_are_graphs_on_300s_alone(device: str, are_graphs: bool) -> None:
    layout = case_of(mixture(f"GPT OSS 120B {device} x64 BF16 GBS1280", "26.04", precision="bf16")).layout
    assert bool(layout.cuda_graphs) == are_graphs


def test_recipes_say_how_states_rest() -> None:
    """Of weights in fp8 alone, gradients in bf16, DeepSeek's moments in bf16, Muon's one moment."""
    found = {
        name: case_of(mixture(f"{name} GB200 x64", "26.04", **parallel)).layout
        for name, parallel in (
            ("DeepSeekV3", {}),
            ("Kimi_K2", {}),
            ("GPT OSS 120B", {"precision": "bf16"}),
            ("Qwen3_30B_a3B", {"p": 1, "zero_stage": 3, "fsdp": 64}),
        )
    }
    said = {name: (one.weights, one.states, one.masters, one.moments) for name, one in found.items()}
    assert said == {
        "DeepSeekV3": ("fp8", "bf16", "fp32", 2),
        "Kimi_K2": ("own", "fp32", "fp32", 1),
        "GPT OSS 120B": ("own", "fp32", "remainder", 2),
        "Qwen3_30B_a3B": ("fp8", "fp32", "fp32", 2),
    }
    assert {one.gradients for one in found.values()} == {"own"}
    assert [one.allocation for one in found.values()] == ["expandable"] * 3 + ["caching"]


def test_recipes_say_what_is_computed_again() -> None:
    """Latent attention's projections, unless the whole iteration is a graph on GB300, and in the first layers all."""
    again = {
        (name, release): recomputed(system(row), row)
        for name, release in (
            ("DeepSeekV3 GB200 x256 MXFP8", "26.06"),
            ("DeepSeekV3 GB300 x256 MXFP8", "26.04"),
            ("DeepSeekV3 GB300 x256 MXFP8", "26.06"),
            ("DeepSeekV3 (dropless) H100 x1024 FP8", "25.09"),
            ("Kimi_K2 GB300 x256 MXFP8", "26.06"),
            ("GPT OSS 120B B200 x64 BF16", "26.04"),
            ("GPT OSS 120B GB300 x64 BF16", "26.04"),
        )
        for row in [mixture(name, release)]
    }
    row = mixture("DeepSeekV3 (dropless) H100 x1024 FP8", "25.09")
    row["model"]["dense_layers"] = 2
    up, norms = ("*.attention.up*",), ("*.norm1", "*.norm2")
    assert list(again.values()) == [up, up, (), up, up, norms, ()]
    assert recomputed(system(row), row) == (*up, "layers.0.mlp*", "layers.1.mlp*")
