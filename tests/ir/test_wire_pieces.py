"""What travels between two meshes: every receiver gets each of its elements once, from one that has it."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.ir.placements import coordinate_of, is_valid, parse_placements, short, take_local
from autopar.ir.stage_meshes import StageMeshes, on_axes
from autopar.ir.wire_pieces import Box, Layout, busiest_elements, wire_pieces

SHAPES = ((24, 7), (7, 5), (16, 12), (1, 3), (0, 4))
MESHES = ((1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (1, 3))
NAMES = ("R", "S(0)", "S(1)", "S(0/2)", "S(0/4)", "S(0:3+1)", "S(1:2+1+1)")
LAYOUTS = st.builds(
    lambda mesh, *names: Layout(parse_placements(",".join(names)), mesh),
    st.sampled_from(MESHES),
    *[st.sampled_from(NAMES)] * 2,
)


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(box):
        tensor = tensor.narrow(dim, start, length)
    return tensor


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SHAPES), LAYOUTS, LAYOUTS)
def test_every_element_arrives_once(shape: tuple[int, ...], source: Layout, target: Layout) -> None:
    assume(all(is_valid(own.placements, shape, own.mesh) for own in (source, target)))
    whole = torch.arange(prod(shape)).reshape(shape)
    held, wanted = (
        [take_local(whole, own.placements, own.mesh, coordinate_of(device, own.mesh)) for device in range(own.devices)]
        for own in (source, target)
    )
    received = [torch.full_like(shard, -1) for shard in wanted]
    arrived = 0
    for piece in wire_pieces(shape, source, target):
        cut(received[piece.receiver], piece.received).copy_(cut(held[piece.sender], piece.sent))
        arrived += piece.elements
    assert all(map(torch.equal, received, wanted))
    assert arrived == sum(shard.numel() for shard in wanted)


def test_receivers_take_turns_with_senders_that_hold_the_same() -> None:
    pieces = wire_pieces((8,), Layout(parse_placements("R"), (2,)), Layout(parse_placements("R"), (4,)))
    assert [(piece.sender, piece.receiver) for piece in pieces] == [(0, 0), (0, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize(("place", "elements"), [("R", 18), ("S(0)", 6)])
def test_the_busiest_device_limits_a_wire(place: str, elements: int) -> None:
    """One device sends to three: each of them all of it, or its rows."""
    one, three = ((1,), (3,))
    ends = (Layout(on_axes(parse_placements(place), mesh), mesh) for mesh in (one, three))
    assert busiest_elements((3, 2), *ends) == elements


def test_placements_read_on_axes_of_one_device() -> None:
    assert short(on_axes(parse_placements("S(0),S(1)"), (1, 3))) == "(R,S(1))"


def test_the_devices_of_stages_follow_each_other() -> None:
    meshes = StageMeshes(((1, 2), (2, 2), (1, 1)))
    assert [meshes.place(index) for index in (1, 2, 5, 6)] == [(0, (0, 1)), (1, (0, 0)), (1, (1, 1)), (2, (0, 0))]
    assert (meshes.whole, meshes.largest, meshes.devices) == ((7,), (2, 2), 7)
    assert StageMeshes.equal(2, (3,)).whole == (2, 3)
