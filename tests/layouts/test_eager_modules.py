"""Modules that run operation by operation: what they keep, move and draw."""

from __future__ import annotations

import dataclasses

import torch

from autopar.layout import Layout
from autopar.layouts.model import LayoutModel
from benchmarks.published_models import build

from .test_price import A100, SHAPE, model


def test_eager_modules_keep_and_move_more() -> None:
    fused, eager = (model().sections(Layout(eager=globs), A100).layers[1] for globs in ((), ("*",)))
    assert eager.saved > fused.saved
    assert eager.forward.compute > fused.forward.compute


def test_other_libraries_draw_while_they_write() -> None:
    """Operation by operation, dropout writes a mask of a byte, and reads and writes what it keeps a few times. (The
    runtime's own numbers take 128 bytes each.)"""
    shape = dataclasses.replace(SHAPE, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096, seq=1024, flash=True)
    ids = torch.empty(8, shape.seq, dtype=torch.long, device="meta")
    without, with_drops = (
        LayoutModel.of(build(dataclasses.replace(shape, dropout=drops)), (ids, ids))
        .sections(Layout(microbatch=8, eager=("*",)), A100)
        .layers[1]
        .forward.compute
        for drops in (False, True)
    )
    dropped = 2 * 8 * 1024 * 1024
    moved = (with_drops - without) * A100.device.memory_bandwidth
    assert dropped < moved < 32 * dropped
