"""Views, cuts and joins on meshes of several axes, where strided shards of several factors meet on one dim.

What each device computes is compared with what :func:`autopar.ir.placements.take_local` says it should hold.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.distributed.tensor import Partial, Shard

from autopar.ir.placements import AxisStrategy, Placements, Strategy, StridedShard, local_shape, take_local
from autopar.passes.annotate.annotate import axis_strategies
from autopar.passes.rule_language.compose import compose
from autopar.passes.rule_language.registry import LocalContext, OpCall, local_call
from tests.oracle.harness import Case, Sample, close, execute, split

Mesh = tuple[int, ...]
Place = tuple[int, ...]


def counted(*shape: int) -> torch.Tensor:
    """All elements different, so that none can be taken for another."""
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 1


def reshape(source: tuple[int, ...], *target: int) -> Sample:
    return Sample("aten.reshape.default", (counted(*source), target))


SAMPLES = {
    "merge": reshape((4, 8, 3), 32, 3),
    "merge three": reshape((2, 4, 4), 32),
    "fused heads": reshape((4, 24), 4, 3, 4, 2),
    "fuse heads": reshape((4, 3, 4, 2), 4, 24),
    "regroup": reshape((8, 12), 12, 8),
    "move a cut": reshape((4, 8, 6), 8, 4, 6),
    "uneven whole dim": reshape((7, 16), 7, 4, 4),
    "split": Sample("aten.split.Tensor", (counted(4, 48), 16, 1)),
    "cat": Sample("aten.cat.default", ([counted(4, 8), counted(4, 8)], 1)),
    "multiply": Sample("aten.mul.Tensor", (counted(16, 3), counted(16, 1))),
    "add twice": Sample("aten.add.Tensor", (counted(4, 16), counted(16))),
    "sum": Sample("aten.sum.dim_IntList", (counted(16, 5), [0])),
    "permute": Sample("aten.permute.default", (counted(16, 7), [1, 0])),
    "expand": Sample("aten.expand.default", (counted(7, 1), [4, 7, 8])),
    "whole slice": Sample("aten.slice.Tensor", (counted(7, 16), 1, 0, 16)),
    "slice backward": Sample("aten.slice_backward.default", (counted(8, 3), [8, 7], 1, 2, 5, 1)),
    "full": Sample("aten.full.default", ([7, 16], 1.5), {"dtype": torch.float64}),
    "product": Sample("aten.mm.default", (counted(8, 12), counted(12, 8))),
}


def offer(call: OpCall) -> tuple[AxisStrategy, ...]:
    """Everything there is on one axis, with each factor that divides."""
    tensors = (t for t in (*call.inputs, *call.outputs) if t is not None)
    sizes = {int(size) for tensor in tensors for size in tensor.shape}
    return axis_strategies(call, {n: frozenset(b for b in range(2, n) if n % b == 0) for n in sizes})


def addends(whole: torch.Tensor, placements: Placements, mesh: Mesh) -> dict[Place, torch.Tensor]:
    """By coordinates on the axes ``whole`` is Partial on (0 elsewhere): tensors that add up to it."""
    degrees = [n if isinstance(p, Partial) else 1 for n, p in zip(mesh, placements, strict=True)]
    places = list(itertools.product(*map(range, degrees)))
    return dict(zip(places, split(whole, Partial("sum"), len(places)), strict=True))


def held(parts: dict[Place, torch.Tensor], placements: Placements, mesh: Mesh, at: Place) -> torch.Tensor:
    """What the device at ``at`` holds."""
    own = tuple(i if isinstance(p, Partial) else 0 for i, p in zip(at, placements, strict=True))
    return take_local(parts[own], placements, mesh, at).clone()


def check(case: Case, strategy: Strategy, mesh: Mesh) -> str:
    """Why the strategy is not true; empty if it is."""
    parts = [addends(x, p, mesh) for x, p in zip(case.operands, strategy.inputs, strict=True)]
    local = {}
    for at in itertools.product(*map(range, mesh)):
        context = LocalContext(case.call, strategy.inputs, strategy.outputs, mesh, at)
        op, args, kwargs = local_call(context, strategy.local)
        operands = [held(part, p, mesh, at) for part, p in zip(parts, strategy.inputs, strict=True)]
        local[at] = execute(op, args, dict(kwargs), operands)
    for index, (whole, placements) in enumerate(zip(case.results, strategy.outputs, strict=True)):
        assert whole is not None
        for at in local:
            peers = [
                b
                for b in local
                if all(i == j or isinstance(p, Partial) for i, j, p in zip(at, b, placements, strict=True))
            ]
            pieces = [local[b][index] for b in peers]
            expected = take_local(whole, placements, mesh, at)
            if tuple(expected.shape) != local_shape(tuple(whole.shape), placements, mesh, at):
                return f"local_shape and take_local disagree about {strategy.outputs[index]}"
            if not close(torch.stack([piece for piece in pieces if piece is not None]).sum(0), expected):
                return f"the device at {at} does not hold its part of result {index}"
    return ""


@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 1, 2), pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", SAMPLES)
def test_composed_strategies_are_true(name: str, mesh: Mesh) -> None:
    case = Case.of(SAMPLES[name], mesh[0])
    found = compose(case.call, mesh, offer)
    assert len(found) > 1
    wrong = [f"{strategy}: {reason}" for strategy in found if (reason := check(case, strategy, mesh))]
    assert not wrong, f"{len(wrong)} of {len(found)} are not true:\n" + "\n".join(wrong[:10])


def test_strided_factors_meet_on_one_dim() -> None:
    """The samples exercise what this file is about: batch and sequence sharded in one flattened dim."""
    found = compose(Case.of(SAMPLES["merge"], 2).call, (2, 2), offer)
    assert "(S(0),S(1)) -> (S(0),S(0/4))" in map(str, found)
    assert any(isinstance(p, StridedShard) for s in found for placed in s.inputs for p in placed)


def test_three_factors_of_one_dim() -> None:
    """The factor of an axis may lie between those of two others, in whatever order the axes are listed."""
    x = torch.arange(16)
    placements = (StridedShard(0, 8), StridedShard(0, 4), Shard(0))
    held_by = [take_local(x, placements, (2, 2, 2), at).tolist() for at in itertools.product(range(2), repeat=3)]
    # Digits of 16 = 2 (axis 2) x 2 (nobody) x 2 (axis 1) x 2 (axis 0).
    assert held_by == [[8 * c + 2 * b + a, 8 * c + 4 + 2 * b + a] for a in (0, 1) for b in (0, 1) for c in (0, 1)]
