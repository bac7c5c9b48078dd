"""Placements: text, validity, and that the shards of all devices make the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import OptionsError
from autopar.ir.placements import (
    PARTIAL_SUM,
    REPLICATE,
    Placements,
    Shard,
    StridedShard,
    is_even,
    is_valid,
    local_offset,
    local_shape,
    parse_placements,
    shard,
    short,
    take_local,
)


@pytest.mark.parametrize(
    ("text", "placements"),
    [
        ("R", (REPLICATE,)),
        ("S(0),R", (Shard(0), REPLICATE)),
        ("(S(0),S(1))", (Shard(0), Shard(1))),
        ("(S(0/3),P(sum))", (StridedShard(0, 3), PARTIAL_SUM)),
        ("P", (PARTIAL_SUM,)),
    ],
)
def test_text(text: str, placements: Placements) -> None:
    assert parse_placements(text) == placements
    assert parse_placements(short(placements)) == placements


def test_spaces_around_placements_are_nothing() -> None:
    assert parse_placements(" ( S(0) , R ) ") == parse_placements("S(0) ,R") == (Shard(0), REPLICATE)
    assert parse_placements("()") == ()


@pytest.mark.parametrize(
    "text",
    ["X", "S", "S(a)", "S(0),Q", "", "s(0)", "S( 0 )", "S(-1)", "S(0)R", "S(0) R", "P(median)", "((R))", "S(\u0663)"],
)
def test_bad_text(text: str) -> None:
    with pytest.raises(OptionsError, match="is not a placement"):
        parse_placements(text)


@pytest.mark.parametrize("text", ["(S(0)", "S(0))", "(S(0),R", "S(0),R)", "(S(0),R))"])
def test_brackets_that_nothing_closes_are_named(text: str) -> None:
    with pytest.raises(OptionsError, match=rf"has {text.count('(')} '\(' and {text.count(')')} '\)'"):
        parse_placements(text)


@pytest.mark.parametrize("text", ["S(0),,R", "S(0),", ",R", "(R,)", "(,)"])
def test_an_empty_place_between_commas_is_none(text: str) -> None:
    with pytest.raises(OptionsError, match="has an empty place"):
        parse_placements(text)


placement = st.one_of(st.just(REPLICATE), st.builds(shard, st.just(0), st.sampled_from([1, 2, 3, 4, 6, 8])))
meshes = st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 1, 2), (2, 2, 2)])


@given(st.sampled_from([5, 6, 8, 12, 24, 96, 257]), meshes, st.data())
def test_shards_partition_the_tensor(size: int, mesh: tuple[int, ...], data: st.DataObject) -> None:
    places = tuple(data.draw(placement) for _ in mesh)
    if not is_valid(places, (size, 2), mesh):
        return
    tensor = torch.arange(2 * size).reshape(size, 2)
    found = []
    for coordinate in itertools.product(*map(range, mesh)):
        local = take_local(tensor, places, mesh, coordinate)
        assert tuple(local.shape) == local_shape((size, 2), places, mesh, coordinate)
        if all(index == 0 for index, place in zip(coordinate, places, strict=True) if place == REPLICATE):
            found.append(local.flatten())
    assert torch.equal(torch.cat(found).sort().values, tensor.flatten())


def test_uneven_shards_follow_torch_chunk() -> None:
    sizes = [local_shape((257,), (Shard(0),), (4,), (i,))[0] for i in range(4)]
    assert sizes == [len(c) for c in torch.arange(257).chunk(4)] == [65, 65, 65, 62]
    assert [local_offset((257,), (Shard(0),), (4,), (i,), 0) for i in range(4)] == [0, 65, 130, 195]
    assert not is_even((Shard(0),), (257,), (4,))


def test_a_strided_factor_must_divide_and_nest() -> None:
    assert is_valid((StridedShard(0, 3),), (12,), (4,))
    assert not is_valid((StridedShard(0, 3),), (12,), (3,))
    assert is_valid((Shard(0), StridedShard(0, 4)), (16,), (2, 2))
    assert not is_valid((Shard(0), StridedShard(0, 3)), (12,), (2, 2))
    assert not is_valid((Shard(1),), (4,), (2,))
