"""The generator: its numbers are a function of their place alone, and are as random as numbers must be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.placements import (
    Placement,
    StridedShard,
    chunk_bounds,
    factor_groups,
    is_valid,
    local_runs,
    shard,
    take_local,
)
from autopar.ops.random import DRAWS, _blocks, position_strides, stream
from autopar.trace.decompositions.random import RANDOM

aten, ours = torch.ops.aten, torch.ops.autopar
OPTIONS = {"dtype": torch.float32, "device": torch.device("cpu")}


def state(seed: int = 1, kind: int = 0, step: int = 0, sample: int = 0) -> torch.Tensor:
    return torch.tensor([seed, kind, step, sample])


def bits(*size: int, place: int = 0, of: torch.Tensor | None = None, **part: Sequence[int] | int) -> torch.Tensor:
    options = {**OPTIONS, "dtype": torch.int64, **part}
    found: torch.Tensor = ours.random_bits(state() if of is None else of, size, place=place, **options)
    return found


def test_numbers_are_fixed() -> None:
    """What was drawn once is drawn for ever, or training runs could not be repeated."""
    assert bits(4).tolist() == [1300511432978304576, 333808630090186997, 325067933018316317, 7323561398804743421]


def test_the_generator_is_splitmix64() -> None:
    """The values of the published generator for seed 1234567 and the golden gamma."""
    gamma = 0x9E3779B97F4A7C15 - (1 << 64)
    (found,) = _blocks([(5, 1)], 1234567 + gamma, gamma, torch.device("cpu"))
    assert [number % (1 << 64) for number in found.tolist()] == [
        *(6457827717110365317, 3203168211198807973, 9817491932198370423),
        *(4593380528125082431, 16408922859458223821),
    ]


def test_every_bit_is_fair_and_independent_of_every_other() -> None:
    count = 1 << 16
    numbers = bits(count)
    split = (numbers[:, None] >> torch.arange(63)) & 1
    signs = split.double() * 2 - 1
    table = signs.T @ signs / math.sqrt(count)
    assert float(signs.mean(0).abs().max()) * math.sqrt(count) < 4.5
    assert float((table - torch.diag(table.diag())).abs().max()) < 5.5


def test_uniform_numbers_fill_their_cells_evenly() -> None:
    """Chi-squared of 256 cells, singly and by pairs of neighbours."""
    found = ours.uniform(state(), [1 << 18], **OPTIONS)
    for cells in ((found * 256).long(), (found[::2] * 16).long() * 16 + (found[1::2] * 16).long()):
        counts = torch.bincount(cells, minlength=256).double()
        expected = counts.sum() / 256
        statistic = float(((counts - expected) ** 2 / expected).sum())
        assert 255 - 5 * math.sqrt(510) < statistic < 255 + 5 * math.sqrt(510)


@pytest.mark.parametrize("other", [state(seed=2), state(kind=1), state(step=1)])
def test_streams_are_independent(other: torch.Tensor) -> None:
    count = 1 << 16
    one, two = ours.normal(state(), [count], **OPTIONS), ours.normal(other, [count], **OPTIONS)
    assert abs(float((one * two).mean())) * math.sqrt(count) < 4.5


def test_places_and_shifted_places_are_independent() -> None:
    count = 1 << 16
    one = ours.normal(state(), [count], **OPTIONS)
    for place in range(1, 6):
        two = ours.normal(state(), [count], place=place, **OPTIONS)
        for shift in (0, 1, 7):
            assert abs(float((one * two.roll(shift)).mean())) * math.sqrt(count) < 4.5
    for shift in (1, 2, 3, 64, 768):
        assert abs(float((one * one.roll(shift)).mean())) * math.sqrt(count) < 4.5


def test_normal_numbers_have_normal_moments() -> None:
    found = ours.normal(state(), [1 << 18], **{**OPTIONS, "dtype": torch.float64})
    moments = [float((found**k).mean()) for k in range(1, 5)]
    deviations = [math.sqrt(v / found.numel()) for v in (1, 2, 15, 96)]
    for moment, expected, deviation in zip(moments, (0, 1, 0, 3), deviations, strict=True):
        assert abs(moment - expected) < 4.5 * deviation


@pytest.mark.parametrize("p", [0.0, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_bernoulli_has_its_rate(p: float, dtype: torch.dtype) -> None:
    found = ours.bernoulli(state(), [1 << 16], p, dtype=dtype, device=torch.device("cpu"))
    assert found.dtype == dtype
    assert abs(float(found.double().mean()) - p) <= 4.5 * math.sqrt(p * (1 - p) / found.numel())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_is_below_one_in_every_dtype(dtype: torch.dtype) -> None:
    found = ours.uniform(state(), [1 << 16], dtype=dtype, device=torch.device("cpu"))
    wide = ours.uniform(state(), [1 << 16], dtype=torch.float64, device=torch.device("cpu"))
    assert found.dtype == dtype and float(found.min()) >= 0 and float(found.max()) < 1
    assert float((found.double() - wide).abs().max()) <= torch.finfo(dtype).eps


def test_gammas_are_odd_and_change_often() -> None:
    for place in range(200):
        gamma = stream(0, 0, 0, place)[1]
        assert gamma % 2 == 1
        assert ((gamma ^ (gamma >> 1)) & ((1 << 64) - 1)).bit_count() >= 20


def test_large_positions_do_not_wrap_early() -> None:
    far = 3 << 40
    found = bits(4, first=far, counts=[4], strides=[1])
    assert torch.equal(found, bits(8, first=far - 4, counts=[8], strides=[1])[4:])
    assert not torch.equal(found, bits(4))


def test_blocks_do_not_show() -> None:
    """A tensor larger than a block, cut in ways that end blocks elsewhere."""
    whole = bits(3, 40_000)
    assert torch.equal(bits(3, 100, first=39_900, counts=[3, 100], strides=[40_000, 1]), whole[:, 39_900:])
    assert torch.equal(bits(40_000, 3, first=0, counts=[40_000, 3], strides=[1, 40_000]), whole.T)


def test_a_batch_in_pieces_is_the_batch() -> None:
    """The state says with which sample a piece begins, whichever dim counts samples, by however many rows each."""
    whole = bits(6, 5)
    for sample in (0, 2, 4):
        assert torch.equal(bits(2, 5, of=state(sample=sample), samples=[0, 5]), whole[sample : sample + 2])
    inner = bits(3, 6, samples=[1, 3])
    assert torch.equal(bits(3, 2, of=state(sample=4), samples=[1, 3]), inner[:, 4:])
    rows = bits(12, 5, samples=[0, 10])
    assert torch.equal(bits(4, 5, of=state(sample=2), samples=[0, 10]), rows[4:8])
    assert torch.equal(inner[:, :2], bits(3, 2, samples=[1, 3])), "numbers of a sample depend on how many there are"


MESHES = [(2,), (3,), (2, 2), (2, 3), (2, 1, 2)]


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    """A shape, a mesh and valid placements, strided and uneven ones included."""
    mesh = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.sampled_from([1, 5, 6, 7, 12, 24, 48]), min_size=1, max_size=3)))
    one = st.one_of(
        st.just(torch.distributed.tensor.Replicate()),
        st.builds(shard, st.integers(0, len(shape) - 1), st.sampled_from([1, 1, 2, 3, 4, 6, 12])),
    )
    placements = tuple(draw(one) for _ in mesh)
    return shape, mesh, placements


@settings(max_examples=150, deadline=None)
@given(placed())
def test_every_part_is_a_part_of_the_whole(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = case
    if not is_valid(placements, shape, mesh):
        return
    whole = bits(*shape)
    strides = position_strides(shape, ())
    for coordinate in torch.cartesian_prod(*map(torch.arange, mesh)).reshape(-1, len(mesh)).tolist():
        expected = take_local(whole, placements, mesh, coordinate)
        runs = [(r, s) for d, s in enumerate(strides) for r in local_runs(shape, placements, mesh, coordinate, d)]
        found = bits(
            *expected.shape,
            first=sum(start * step * stride for (start, _, step), stride in runs),
            counts=[count for (_, count, _), _ in runs],
            strides=[step * stride for (_, _, step), stride in runs],
        )
        assert torch.equal(found, expected), (shape, mesh, placements, coordinate)


def test_the_property_test_sees_strided_and_uneven_shards() -> None:
    assert is_valid((StridedShard(0, 3), shard(0)), (12,), (2, 3))
    assert len(factor_groups((StridedShard(0, 3), shard(0)), 0)) == 2
    assert chunk_bounds(7, 3, 2)[1] == 1


def test_every_draw_has_a_fake_form() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        held = ours.random_state()
        for name, op in DRAWS.items():
            rate = (0.5,) if "bernoulli" in name else ()
            assert op(held, [2, 3], *rate, **OPTIONS).shape == (2, 3)


def test_which_random_operations_have_no_form_of_ours() -> None:
    """All that torch marks as random, but for those that reject, rows of composite ones, and those of other devices."""
    left = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            packet, _, overload = name[6:].partition(".")
            found = getattr(getattr(aten, packet, None), overload or "default", None)
            tags = getattr(found, "tags", ())
            if torch.Tag.nondeterministic_seeded in tags and not found._schema.is_mutable and found not in RANDOM:
                left.add(name[6:].removesuffix(".generator"))
    known = ("attention", "rnn", "_mps", "lstm", "gru", "dropout", "sdp", "softmax", "Tensor_generator", "names")
    rest = {name for name in left if not any(part in name for part in known)}
    assert rest == {
        *("poisson", "binomial", "_standard_gamma", "_sample_dirichlet"),
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint.low_generator", "randint_like"),
        *("randint_like.Tensor", "randint_like.low_generator_dtype", "randperm", "rrelu"),
    }
