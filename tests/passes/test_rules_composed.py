"""Rules on meshes of two axes: localisers see shapes and positions that several axes have divided."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.ir.placements import AxisStrategy, Placements, Strategy, local_shape
from autopar.passes.rule_language.compose import compose
from autopar.passes.rule_language.registry import LocalContext, OpCall, local_call
from autopar.passes.rules import RULES
from tests.oracle.harness import Case, Sample, Tensors, close, execute, join, split
from tests.oracle.random_tensors import floats, integers, permutations

Mesh = tuple[int, ...]
Pieces = dict[tuple[int, ...], torch.Tensor]

_X, _GRAD, _WEIGHT = floats(4, 12, 6), floats(4, 24, 6), floats(24, 1, 3)
_DEPTHWISE = ([1], [1], [1], False, [0], 12)
_GROUPS = (floats(4, 12, 5), floats(12), floats(12), 4, 12, 5, 6, 1e-5)

SAMPLES = [
    Sample("aten.embedding.default", (floats(13, 6), integers(13, 5, 4))),
    Sample("aten.embedding_dense_backward.default", (floats(5, 4, 6), integers(13, 5, 4), 13, 2, False)),
    Sample("aten.gather.default", (floats(8, 13), 1, integers(13, 8, 1))),
    Sample("aten.scatter.value", (torch.zeros(8, 13), 1, permutations(13, 8, 1), -1.0)),
    Sample("aten.index.Tensor", (floats(7, 5, 9), [integers(7, 6), None, integers(9, 6)])),
    Sample("aten.index_put.default", (floats(7, 9), [integers(7, 8), integers(9, 8)], floats(8), True)),
    Sample("aten.convolution.default", (_X, _WEIGHT, floats(24), *_DEPTHWISE)),
    Sample("aten.convolution_backward.default", (_GRAD, _X, _WEIGHT, [24], *_DEPTHWISE, [True] * 3)),
    Sample("aten.convolution.default", (_X, floats(8, 12, 3), None, *_DEPTHWISE[:-1], 1)),
    Sample("aten.native_group_norm.default", _GROUPS),
    Sample("aten.upsample_nearest2d_backward.default", (floats(4, 7, 6, 6), [6, 6], [4, 7, 3, 3])),
    Sample("aten.addmm.default", (floats(6), floats(8, 7), floats(7, 6))),
]


def _split(whole: torch.Tensor, placements: Placements, mesh: Mesh) -> Pieces:
    pieces: Pieces = {(): whole}
    for placement, devices in zip(placements, mesh, strict=True):
        pieces = {
            (*at, i): piece
            for at, tensor in pieces.items()
            for i, piece in enumerate(split(tensor, placement, devices))
        }
    return pieces


def _join(pieces: Pieces, placements: Placements, mesh: Mesh) -> torch.Tensor:
    for placement, devices in zip(reversed(placements), reversed(mesh), strict=True):
        outer = dict.fromkeys(at[:-1] for at in pieces)
        pieces = {at: join([pieces[*at, i] for i in range(devices)], placement) for at in outer}
    return pieces[()]


def _run(call: OpCall, strategy: Strategy, mesh: Mesh, at: tuple[int, ...], shards: list[Pieces]) -> Tensors:
    context = LocalContext(call, strategy.inputs, strategy.outputs, mesh, at)
    op, args, kwargs = local_call(context, strategy.local)
    return execute(op, args, dict(kwargs), [pieces[at] for pieces in shards])


def _offer(call: OpCall) -> tuple[AxisStrategy, ...]:
    return tuple(RULES[call.op](call))


@pytest.mark.parametrize("mesh", [(2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.op)
def test_composed_strategies_are_true(sample: Sample, mesh: Mesh) -> None:
    case = Case.of(sample, mesh[0])
    found = compose(case.call, mesh, _offer)
    assert any(all(p.is_shard() for p in placed) for s in found for placed in s.inputs), "nothing to compose"
    for strategy in found:
        shards = [_split(x, p, mesh) for x, p in zip(case.operands, strategy.inputs, strict=True)]
        places = list(itertools.product(*map(range, mesh)))
        local = {at: _run(case.call, strategy, mesh, at, shards) for at in places}
        for index, whole in enumerate(case.results):
            if whole is None:
                continue
            pieces = {at: results[index] for at, results in local.items()}
            for at, piece in pieces.items():
                assert piece is not None, strategy
                expected = local_shape(tuple(whole.shape), strategy.outputs[index], mesh, at)
                assert tuple(piece.shape) == expected, strategy
            joined = _join({at: p for at, p in pieces.items() if p is not None}, strategy.outputs[index], mesh)
            assert close(joined, whole), strategy
