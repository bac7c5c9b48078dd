"""Modules that run operation by operation: what they keep, move and draw."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from autopar.errors import OptionsError
from benchmarks.emulator.model import LayoutModel
from benchmarks.published_models import build
from benchmarks.recipes import Recipe
from tests.benchmarks.emulator.test_price import A100, SHAPE, model


def test_eager_modules_keep_and_move_more() -> None:
    fused, eager = (model().sections(Recipe(eager=globs), A100).layers[1] for globs in ((), ("*",)))
    assert eager.saved > fused.saved
    assert eager.forward.compute > fused.forward.compute


def test_other_libraries_draw_while_they_write() -> None:
    """Operation by operation, dropout writes a mask of a byte, and reads and writes what it keeps a few times. (The
    runtime's own numbers take 128 bytes each.)"""
    shape = dataclasses.replace(SHAPE, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096, seq=1024, flash=True)
    ids = torch.empty(8, shape.seq, dtype=torch.long, device="meta")
    without, with_drops = (
        LayoutModel.of(build(dataclasses.replace(shape, dropout=drops)), (ids, ids))
        .sections(Recipe(microbatch=8, eager=("*",)), A100)
        .layers[1]
        .forward.compute
        for drops in (False, True)
    )
    dropped = 2 * 8 * 1024 * 1024
    moved = (with_drops - without) * A100.device.memory_bandwidth
    assert dropped < moved < 32 * dropped


def test_layers_with_one_price_are_named_alike() -> None:
    """The third of six equal layers stands for the last four."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))
    traced = LayoutModel.of(model.bfloat16(), (torch.empty(8, 64, dtype=torch.bfloat16),), torch.mean)
    for named, said in (
        (("5.*",), r"eager=\('5.\*',\)\) names 5.0 and not 2.0, .* all 4 layers equal to 2; .* by '\*.0', or in none"),
        (("2",), r"names 2 and not 3, "),
        (("[0-4].1",), r"names 2.1 and not 5.1, "),
    ):
        with pytest.raises(OptionsError, match=said):
            traced.price(Recipe(eager=named), A100)
    for named in (("*.1",), ("0.*", "1"), ("[2-5].*",)):
        assert traced.price(Recipe(eager=named), A100).predicted.step_seconds > 0
