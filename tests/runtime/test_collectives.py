"""Every collective against its definition by ``take_local``, on one and more axes, even and uneven, of every
kind of number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.errors import OptionsError
from autopar.ir.placements import (
    Placements,
    Shard,
    chunk_bounds,
    is_valid,
    local_before,
    parse_placements,
    shard,
    shares_of,
    take_local,
)
from autopar.ir.stage_meshes import StageMeshes
from autopar.runtime.comm import gloo
from autopar.runtime.comm.collectives import Collectives, join_pieces, split_pieces
from autopar.runtime.comm.exchange import Exchange
from autopar.runtime.comm.groups import mesh_groups, mesh_of_one
from autopar.runtime.launch import run_local
from autopar.runtime.pipeline.stage_mesh import StageGroups
from tests.helpers.marks import needs_groups_in_order, slow_but

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def on_mesh(shape: tuple[int, ...], work: Callable[[Collectives], object]) -> list[object]:
    """``work`` on every rank of a mesh of ``shape``."""

    def rank_work(rank: int, world: int) -> object:
        torch.manual_seed(0)
        return work(Collectives(mesh_groups(init_device_mesh("cpu", shape))))

    return run_local(rank_work, math.prod(shape), timeout=200)


def whole(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 2 if dtype == torch.bool else 50, shape).to(dtype)


def own(collectives: Collectives, tensor: torch.Tensor, placements: Placements) -> torch.Tensor:
    return take_local(tensor, placements, collectives.groups.shape, collectives.groups.coordinate)


def expect(found: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, (what, found.shape, wanted.shape)
    assert torch.equal(found, wanted), (what, found, wanted)
    assert found.is_contiguous(), what


# (shape, dim, before): even, uneven, fewer than ranks, empty, inner dims and strided factors.
CUTS = [
    ((8, 3), 0, 1),
    ((5, 3), 0, 1),
    ((2, 3), 0, 1),
    ((2, 7), 1, 1),
    ((3, 9, 2), 1, 1),
    ((0, 3), 0, 1),
    ((3, 0), 0, 1),
]
STRIDED = [((36,), 0, 3), ((2, 24, 3), 1, 2)]


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize(("shape", "dim", "before"), [*CUTS, ((24,), 0, 2), ((2, 12, 3), 1, 1)])
def test_split_and_join_are_inverse(shape: tuple[int, ...], dim: int, before: int, parts: int) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    pieces = split_pieces(tensor, dim, before, parts)
    for index in range(parts):
        length = before * chunk_bounds(shape[dim] // before, parts, index)[1]
        placements = (shard(dim, before),)
        assert torch.equal(pieces[index].narrow(dim, 0, length), take_local(tensor, placements, (parts,), (index,)))
    expect(join_pieces(pieces, dim, before, shape[dim]), tensor, (shape, dim))


@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize("shares", [(3, 1), (1, 2, 1), (2, 5)])
def test_unequal_shares_are_split_and_joined(before: int, shares: tuple[int, ...]) -> None:
    size = before * sum(shares) * 2
    tensor = torch.arange(2 * size * 2).reshape(2, size, 2)
    pieces = split_pieces(tensor, 1, before, len(shares), shares)
    for index, share in enumerate(shares):
        own_piece = take_local(tensor, (shard(1, before, shares),), (len(shares),), (index,))
        assert own_piece.shape[1] == before * share * 2
        padded = pieces[index].unflatten(1, (before, -1))
        assert torch.equal(padded[:, :, : share * 2].flatten(1, 2), own_piece)
        assert not padded[:, :, share * 2 :].any()
    expect(join_pieces(pieces, 1, before, size, shares), tensor, (before, shares))


def gathers(collectives: Collectives) -> None:
    for (shape, dim, before), dtype in itertools.product([*CUTS, *STRIDED], DTYPES):
        tensor = whole(shape, dtype)
        local = own(collectives, tensor, (shard(dim, before),))
        found = collectives.wait(collectives.all_gather(local, (0,), dim, shape[dim], before))
        expect(found, tensor, ("all_gather", shape, dim, before, dtype))


def reductions(collectives: Collectives) -> None:
    group = collectives.groups.over((0,))
    for (shape, dim, before), dtype in itertools.product([*CUTS, *STRIDED], DTYPES):
        parts = [whole(shape, dtype) for _ in range(group.size)]
        ops = ("sum", "max", "min") if dtype != torch.bool else ("max", "min")
        ops = (*ops, "avg") if dtype.is_floating_point else ops
        for op in ops:
            wanted = gloo.reduce_pieces(torch.stack(parts).double(), op) if dtype.is_floating_point else None
            total = wanted.to(dtype) if wanted is not None else gloo.reduce_pieces(torch.stack(parts), op)
            mine = parts[group.index].clone()
            found = collectives.wait(collectives.all_reduce(mine, (0,), op))
            expect(found, total, ("all_reduce", op, shape, dtype))
            found = collectives.wait(collectives.reduce_scatter(mine, (0,), op, dim, before))
            expect(
                found,
                own(collectives, total, (shard(dim, before),)),
                ("reduce_scatter", op, shape, dim, before, dtype),
            )
            assert torch.equal(mine, parts[group.index]), "an operand was overwritten"


def exchanges(collectives: Collectives) -> None:
    cuts = [
        (shape, a, b)
        for shape in ((4, 8), (5, 7), (2, 3, 9), (1, 6))
        for a in range(len(shape))
        for b in range(len(shape))
    ]
    for shape, source, target in cuts:
        if source == target:
            continue
        tensor = whole(shape, torch.float32)
        local = own(collectives, tensor, (Shard(source),))
        handle = collectives.all_to_all(local, (0,), source, shape[source], 1, target, 1)
        expect(
            collectives.wait(handle),
            own(collectives, tensor, (Shard(target),)),
            ("all_to_all", shape, source, target),
        )
    for a, b in ((3, 1), (1, 2), (3, 2)):
        tensor = whole((12 * a, 12 * b), torch.bool)
        local = own(collectives, tensor, (shard(0, a),))
        handle = collectives.all_to_all(local, (0,), 0, 12 * a, a, 1, b)
        expect(collectives.wait(handle), own(collectives, tensor, (shard(1, b),)), ("strided all_to_all", a, b))


def buckets(collectives: Collectives) -> None:
    group = collectives.groups.over((0,))
    cuts = [*CUTS, *STRIDED, ((7,), 0, 1)]
    dims, befores, sizes = [c[1] for c in cuts], [c[2] for c in cuts], [c[0][c[1]] for c in cuts]
    kinds = [torch.float32, torch.bfloat16]
    parts = [[whole(shape, kinds[i % 2]) for i, (shape, _, _) in enumerate(cuts)] for _ in range(group.size)]
    totals = [sum(column[1:], column[0]) for column in zip(*parts, strict=True)]
    found = collectives.wait(collectives.all_reduce_bucket([*parts[group.index], torch.ones(())], (0,), "sum"))
    for value, total in zip(found, [*totals, torch.tensor(float(group.size))], strict=True):
        expect(value.contiguous(), total, "all_reduce_bucket")
    mine = [own(collectives, t, (shard(d, b),)) for t, d, b in zip(totals, dims, befores, strict=True)]
    found = collectives.wait(collectives.reduce_scatter_bucket(parts[group.index], (0,), "sum", dims, befores))
    for value, wanted in zip(found, mine, strict=True):
        expect(value, wanted, "reduce_scatter_bucket")
    found = collectives.wait(collectives.all_gather_bucket(mine, (0,), dims, sizes, befores))
    for value, wanted in zip(found, totals, strict=True):
        expect(value, wanted, "all_gather_bucket")


def outstanding(collectives: Collectives) -> None:
    """Gathers of all sizes under way at once, beside a reduction, awaited last first; operands are let go at once."""
    count = collectives.groups.over((0,)).size
    wholes = [torch.arange(float(count * length)) + length for length in (1, 300_000, 7, 100_000, 50)]
    started = [collectives.all_gather(own(collectives, t, (shard(0),)), (0,), 0, len(t)) for t in wholes]
    reduced = collectives.all_reduce(torch.ones(300_000), (0,))
    for handle, tensor in reversed(list(zip(started, wholes, strict=True))):
        expect(collectives.wait(handle), tensor, "outstanding gather")
    expect(collectives.wait(reduced), torch.full((300_000,), float(count)), "outstanding reduction")


# Three: more than a pair, and not every length divides.
@pytest.mark.parametrize("size", slow_but([3], [3, 2, 4]))
def test_one_axis(size: int) -> None:
    """One start of processes for all."""

    def work(collectives: Collectives) -> None:
        for part in (gathers, reductions, exchanges, buckets, outstanding):
            part(collectives)

    on_mesh((size,), work)


@pytest.mark.slow
def test_large_messages_take_the_other_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "SMALL_BYTES", 16)
    on_mesh((3,), gathers)
    on_mesh((3,), reductions)
    on_mesh((3,), buckets)


def test_several_axes_together_and_apart() -> None:
    def work(collectives: Collectives) -> None:
        tensor = whole((8, 12), torch.float32)
        for axes in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)):
            sharded = tuple(parse_placements("S(0)" if a in axes else "R")[0] for a in range(3))
            local = own(collectives, tensor, sharded)
            expect(collectives.wait(collectives.all_gather(local, axes, 0, 8)), tensor, ("all_gather", axes))
            expect(collectives.slice(tensor, axes, 0), local, ("slice", axes))
            parts = [whole((8, 12), torch.float32) for _ in range(collectives.groups.over(axes).size)]
            total = sum(parts[1:], parts[0])
            mine = parts[collectives.groups.over(axes).index]
            expect(collectives.wait(collectives.all_reduce(mine, axes)), total, ("all_reduce", axes))
            found = collectives.wait(collectives.reduce_scatter(mine, axes, "sum", 0))
            expect(found, own(collectives, total, sharded), ("reduce_scatter", axes))
            kept = collectives.partial(tensor, axes)
            expect(collectives.wait(collectives.all_reduce(kept, axes)), tensor, ("partial", axes))

    on_mesh((2, 1, 2), work)


def test_axes_that_share_a_dim() -> None:
    """The innermost of two axes gathers, then the outer: uneven, and with factors of a strided dim."""

    def work(collectives: Collectives) -> None:
        mesh = collectives.groups.shape
        for text, size in (
            ("S(0),S(0)", 7),
            ("S(0),S(0)", 5),
            ("S(0),S(0/2)", 8),
            ("S(0),S(0/6)", 24),
            ("S(0/3),S(0/3)", 24),
            ("S(0:3+1),S(0)", 12),
            ("S(0),S(0:1+2)", 6),
            ("S(0/3:3+1),S(0/3:1+2)", 36),
            ("S(0:3+1),S(0/4)", 24),
        ):
            placements = parse_placements(text)
            first, second = map(shares_of, placements)
            here = collectives.groups.coordinate
            assert is_valid(placements, (size, 2), mesh)
            tensor = torch.arange(2.0 * size).reshape(size, 2)
            outer = (placements[0], parse_placements("R")[0])
            half = own(collectives, tensor, outer)
            before = local_before(placements, 1, mesh, here)
            local = collectives.slice(half, (1,), 0, before, second)
            expect(local, own(collectives, tensor, placements), text)
            found = collectives.wait(collectives.all_gather(local, (1,), 0, half.shape[0], before, second))
            expect(found, half, text)
            before = local_before(outer, 0, mesh, here)
            expect(collectives.wait(collectives.all_gather(half, (0,), 0, size, before, first)), tensor, text)

    on_mesh((2, 2), work)


def test_many_at_once_are_awaited_in_any_order() -> None:
    def work(collectives: Collectives) -> None:
        handles = [
            collectives.all_reduce(torch.full((n * 3000,), float(n)), ((0,), (1,), (0, 1))[n % 3]) for n in range(1, 24)
        ]
        for number, handle in reversed(list(enumerate(handles, 1))):
            size = collectives.groups.over(((0,), (1,), (0, 1))[number % 3]).size
            assert torch.equal(collectives.wait(handle), torch.full((number * 3000,), float(number * size)))

    on_mesh((2, 2), work)


def test_every_rank_gets_the_same_bits() -> None:
    def work(collectives: Collectives) -> list[torch.Tensor]:
        torch.manual_seed(collectives.groups.coordinate[0])
        return [collectives.wait(collectives.all_reduce(torch.randn(n), (0,))) for n in (5, 1 << 18)]

    results = on_mesh((4,), work)
    assert all(torch.equal(a, b) for result in results for a, b in zip(results[0], result, strict=True))  # type: ignore


def test_one_device_says_nothing() -> None:
    def work(rank: int, world: int) -> None:
        collectives = Collectives(mesh_groups(mesh_of_one("cpu", 2)))
        gathers(collectives)
        reductions(collectives)
        exchanges(collectives)
        buckets(collectives)
        assert collectives.groups.over((0, 1)).group is None

    run_local(work, 1, timeout=30, backend=None)


@needs_groups_in_order
def test_a_transposed_mesh_gathers_in_the_order_of_its_coordinates() -> None:
    def work(rank: int, world: int) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        groups = mesh_groups(DeviceMesh("cpu", torch.arange(4).reshape(2, 2).t().contiguous()))
        collectives, place = Collectives(groups), 2 * groups.coordinate[0] + groups.coordinate[1]
        gathered = collectives.wait(collectives.all_gather(torch.full((1,), float(place)), (0, 1), 0, 4))
        assert gathered.tolist() == [0.0, 1.0, 2.0, 3.0]
        for exchange in (Exchange(groups), Exchange(groups, apart=True)):
            assert (exchange.ranks, exchange.index) == ((0, 2, 1, 3), place)
            assert exchange.all_objects(rank) == [0, 2, 1, 3]
            assert exchange.all_bytes(bytes([rank])) == [bytes([each]) for each in (0, 2, 1, 3)]

    run_local(work, 4, timeout=60)


def test_a_torch_that_sorts_ranks_refuses_a_transposed_mesh_alone() -> None:
    def work(rank: int, world: int) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        original = dist.new_group

        def sorting(ranks: list[int], timeout: Any, backend: Any, use_local_synchronization: bool) -> Any:
            return original(ranks, timeout, backend, use_local_synchronization=use_local_synchronization)

        with patch.object(dist, "new_group", sorting):
            usual = Exchange(mesh_groups(DeviceMesh("cpu", torch.arange(4).reshape(2, 2))))
            assert usual.all_objects(rank) == [0, 1, 2, 3]
            with pytest.raises(OptionsError, match=r"the ranks \[0, 2, 1, 3\] of one group do not ascend"):
                Exchange(mesh_groups(DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]))))

    run_local(work, 4, timeout=60)


def test_messages_between_stages_of_a_transposed_mesh_find_their_ranks() -> None:
    def work(rank: int, world: int) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        whole = mesh_groups(DeviceMesh("cpu", torch.arange(4).reshape(2, 2).t().contiguous()))
        stages = StageGroups(whole, StageMeshes(((2,), (1,), (1,))))
        assert stages.peers is not None
        # Stages 0, 1 and 2 have the ranks 0 and 2, 1, and 3.
        found = [dist.get_global_rank(stages.peers, stages.peer(stage, at)) for stage, at in ((0, 0), (0, 1), (1, 0))]
        assert found == [0, 2, 1]

    run_local(work, 4, timeout=60)


def test_ranks_must_ascend() -> None:
    def work(rank: int, world: int) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        mesh_groups(DeviceMesh("cpu", torch.tensor([[0, 1], [3, 2]])))

    with pytest.raises(OptionsError, match=r"\[\[0, 1\], \[3, 2\]\] do not ascend along axis 1"):
        run_local(work, 4, timeout=30)
