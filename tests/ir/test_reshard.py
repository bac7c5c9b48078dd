"""Every hop moves the data as its placements say, and the cheapest paths reach their targets."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.ir.node import TensorType
from autopar.ir.placements import (
    PARTIAL_SUM,
    REPLICATE,
    Placement,
    Placements,
    Shard,
    StridedShard,
    is_valid,
    take_local,
)
from autopar.ir.reshard import Hop, hops_among, make_hop, neighbours
from autopar.passes.lower.emit import hop_arguments
from tests.helpers.simulate import _one

MESHES = [(2,), (4,), (2, 2), (2, 3), (2, 1, 2)]
OPTIONS: tuple[Placement, ...] = (REPLICATE, PARTIAL_SUM, Shard(0), Shard(1), StridedShard(0, 2), StridedShard(0, 4))


def scatter(whole: torch.Tensor, places: Placements, mesh: tuple[int, ...]) -> list[torch.Tensor]:
    """One local tensor per device: shards, and for Partial axes random addends that sum to the value."""
    generator = torch.Generator().manual_seed(0)
    addends = {(): whole}
    for axis, place in enumerate(places):
        grown = {}
        for key, value in addends.items():
            rest = value
            for index in range(mesh[axis]):
                part = value
                if place == PARTIAL_SUM:
                    last = index == mesh[axis] - 1
                    part = rest if last else torch.randint(-9, 9, value.shape, generator=generator).to(value.dtype)
                    rest = rest - part
                grown[(*key, index)] = part
        addends = grown
    return [take_local(addends[c], places, mesh, c) for c in itertools.product(*map(range, mesh))]


def apply(hop: Hop, kind: TensorType, locals_: list[torch.Tensor], mesh: tuple[int, ...]) -> list[torch.Tensor]:
    coordinates = list(itertools.product(*map(range, mesh)))
    found = []
    for here in coordinates:
        group = [
            i for i, c in enumerate(coordinates) if all(a in hop.axes or c[a] == here[a] for a in range(len(mesh)))
        ]
        arguments = dict(hop_arguments(hop, kind, mesh, here))
        index = group.index(coordinates.index(here))
        found.append(_one(hop.kind, [locals_[i] for i in group], index, arguments))
    return found


def whole_of(
    locals_: list[torch.Tensor], places: Placements, shape: tuple[int, ...], mesh: tuple[int, ...]
) -> torch.Tensor:
    """The global value of locals without Partial axes summed up by hand."""
    partial = [a for a, p in enumerate(places) if p == PARTIAL_SUM]
    total = torch.zeros(shape, dtype=locals_[0].dtype)
    positions = torch.arange(total.numel()).reshape(shape)
    for local, coordinate in zip(locals_, itertools.product(*map(range, mesh)), strict=True):
        copies = [a for a, p in enumerate(places) if p == REPLICATE]
        if any(coordinate[a] for a in copies):
            continue
        where = take_local(positions, places, mesh, coordinate).flatten()
        total.view(-1).index_add_(0, where, local.flatten())
    assert partial is not None
    return total


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shape", [(8, 6), (16, 4), (7, 5)])
def test_every_hop_keeps_the_value(mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    kind = TensorType(shape, torch.float64)
    whole = torch.randint(-9, 9, shape).double()
    seen = 0
    for source in itertools.product(*(OPTIONS if n > 1 else (REPLICATE,) for n in mesh)):
        if not is_valid(source, shape, mesh):
            continue
        start = scatter(whole, source, mesh)
        for hop in neighbours(kind, source, tuple(OPTIONS for _ in mesh), mesh):
            seen += 1
            after = apply(hop, kind, start, mesh)
            assert torch.equal(whole_of(after, hop.target, shape, mesh), whole), hop
    assert seen > 8


def test_bytes_are_those_of_the_full_tensor_padding_included() -> None:
    kind = TensorType((257, 4), torch.float32)
    gather = make_hop(kind, (Shard(0),), (REPLICATE,), (4,))
    assert gather is not None and gather.collective is not None and gather.collective.bytes == 4 * 65 * 4 * 4
    reduce = make_hop(kind, (PARTIAL_SUM,), (REPLICATE,), (4,))
    assert reduce is not None and reduce.collective is not None and reduce.collective.bytes == 257 * 4 * 4


def test_axes_reduce_together() -> None:
    kind = TensorType((8, 4), torch.float32)
    hop = make_hop(kind, (PARTIAL_SUM, PARTIAL_SUM), (REPLICATE, REPLICATE), (2, 2))
    assert hop is not None and hop.axes == (0, 1) and hop.kind == "all_reduce"


def test_an_outer_axis_cannot_move_while_an_inner_one_chunks_the_same_dim() -> None:
    kind = TensorType((8, 4), torch.float32)
    assert make_hop(kind, (Shard(0), Shard(0)), (REPLICATE, Shard(0)), (2, 2)) is None
    assert make_hop(kind, (Shard(0), Shard(0)), (Shard(0), REPLICATE), (2, 2)) is not None
    assert make_hop(kind, (Shard(0), Shard(0)), (REPLICATE, REPLICATE), (2, 2)) is not None
    uneven = TensorType((7, 4), torch.float32)
    assert make_hop(uneven, (Shard(0), Shard(0)), (REPLICATE, REPLICATE), (2, 2)) is None


@pytest.mark.parametrize("mesh", MESHES)
def test_hops_among_valid_placements_are_those_of_each_and_found_once(mesh: tuple[int, ...]) -> None:
    kind, options = TensorType((8, 6), torch.float32), (OPTIONS,) * len(mesh)
    states, hops = hops_among(kind, options, mesh)
    assert set(states) == {p for p in itertools.product(*options) if is_valid(p, (8, 6), mesh)}
    numbers = {state: number for number, state in enumerate(states)}
    for state, start in numbers.items():
        expected = [(start, numbers[hop.target], hop) for hop in neighbours(kind, state, options, mesh)]
        assert [(*ends, hop) for ends, hop in hops.items() if ends[0] == start] == expected
    assert hops_among(TensorType((8, 6), torch.float32), options, mesh)[1] is hops
