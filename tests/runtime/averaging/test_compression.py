"""Compressed exchanges with error feedback, against replicas in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar import DiLoCo, Gossip, LocalSGD, PowerSGD, TopK
from autopar.runtime.averaging.codecs import codec_of, pack, unpack
from tests.runtime.averaging.training import Exchange, assert_same, batches, made, simulated, trained

Code = Callable[[torch.Tensor], torch.Tensor]


def bf16(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16).to(value.dtype)


def int8(value: torch.Tensor) -> torch.Tensor:
    scale = (value.abs().max() / 127).float().to(value.dtype)
    return (value / scale).round().clamp(-127, 127) * scale


def top(fraction: float, value: torch.Tensor) -> torch.Tensor:
    flat = value.flatten()
    kept = torch.zeros_like(flat)
    places = flat.abs().argsort(descending=True)[: max(1, math.ceil(fraction * flat.numel()))]
    kept[places] = flat[places].float().to(value.dtype)
    return kept.view_as(value)


CODES: dict[str, tuple[Any, Code]] = {
    "bf16": ("bf16", bf16),
    "int8": ("int8", int8),
    "top-k": (TopK(0.1), partial(top, 0.1)),
}


def coded_mean(every: int, code: Code, outer: Any = None) -> Exchange:
    """Local SGD or DiLoCo whose changes are coded, each replica adding what the code lost the time before."""
    anchors: list[torch.Tensor] = []
    lost: list[list[torch.Tensor]] = []
    optimizers: list[torch.optim.Optimizer] = []

    def exchange(models: list[nn.Module], step: int) -> None:
        if step % every:
            return
        for number, group in enumerate(zip(*(model.parameters() for model in models), strict=True)):
            wanted = [anchors[number] - own + lost[number][i] for i, own in enumerate(group)]
            sent = [code(value) for value in wanted]
            lost[number] = [value - own for value, own in zip(wanted, sent, strict=True)]
            anchors[number].grad = torch.stack(sent).mean(0)
        if outer is None:
            for anchor in anchors:
                anchor.sub_(anchor.grad)
        else:
            optimizers[0].step()
        for number, group in enumerate(zip(*(model.parameters() for model in models), strict=True)):
            for own in group:
                own.copy_(anchors[number])

    def begin(models: list[nn.Module], step: int) -> None:
        if not anchors:
            beginning = start()
            anchors.extend(beginning)
            lost.extend([[torch.zeros_like(value) for _ in models] for value in beginning])
            if outer is not None:
                optimizers.append(outer(anchors))
        exchange(models, step)

    return begin


def start() -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in made().parameters()]


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_a_code_loses_is_sent_next_time(name: str, replicas: int) -> None:
    compression, code = CODES[name]
    found = trained(LocalSGD(every=2, compression=compression), (replicas,), data := batches(8, rows=3 * replicas))
    assert_same(found, simulated(coded_mean(2, code), replicas, data))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"zero": 3}, {"stages": 2, "microbatches": 1}])
def test_bf16_under_plans_inside_the_replica(options: dict[str, Any]) -> None:
    found = trained(DiLoCo(every=2, compression="bf16"), (2, 2), data := batches(8), **options)
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    assert_same(found, simulated(coded_mean(2, bf16, outer), 2, data))


def power_mean(every: int, rank: int) -> Exchange:
    """PowerSGD, algorithm 1 and 2 of Vogels et al. 2019, on the change since the last exchange. The first products
    are those that torch draws."""
    state: dict[str, Any] = {}

    def exchange(models: list[nn.Module], step: int) -> None:
        groups = list(zip(*(model.parameters() for model in models), strict=True))
        if not state:
            state["anchors"] = start()
            state["lost"] = [[torch.zeros_like(own) for own in group] for group in groups]
            state["q"] = None
        if step % every:
            return
        changes = [
            [anchor - own + lost for own, lost in zip(group, losts, strict=False)]  # the last may have left
            for anchor, group, losts in zip(state["anchors"], groups, state["lost"], strict=True)
        ]
        matrices = [n for n, each in enumerate(changes) if gains(each[0].shape, rank)]
        if state["q"] is None:
            state["q"] = drawn([changes[n][0].shape for n in matrices], rank)
        for n, group in enumerate(changes):
            mean = torch.stack(group).mean(0)
            if n in matrices:
                at = matrices.index(n)
                q = orthogonal(state["q"][at])
                p = orthogonal(torch.stack([each @ q for each in group]).sum(0))
                state["q"][at] = torch.stack([each.T @ p for each in group]).mean(0)
                mean = p @ state["q"][at].T
            # Of what is sent whole, too, as torch does: these sum up to zero, unless a replica leaves.
            state["lost"][n] = [each - mean for each in group]
            state["anchors"][n] -= mean
            for own in groups[n]:
                own.copy_(state["anchors"][n])

    return exchange


def gains(shape: torch.Size, rank: int) -> bool:
    return len(shape) == 2 and sum(shape) * min(*shape, rank) < shape.numel()


def drawn(shapes: list[torch.Size], rank: int) -> list[torch.Tensor]:
    seed = numpy.random.RandomState(0).randint(1_000_000_000)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [torch.randn(1, s[1], min(*s, rank), dtype=torch.float64)[0] for s in shapes]


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    return torch.linalg.qr(matrix).Q


@pytest.mark.parametrize("replicas", [2])
def test_power_sgd_is_that_of_the_paper(replicas: int) -> None:
    found = trained(LocalSGD(every=2, compression=PowerSGD(rank=1)), (replicas,), data := batches(9))
    expected = simulated(power_mean(2, 1), replicas, data)
    assert_same(found, expected, 1e-6)


def choco(every: int, code: Code, consensus: float) -> Exchange:
    """CHOCO-SGD on a ring, with all that replicas know of each other kept whole."""
    known: list[torch.Tensor] = []

    def exchange(models: list[nn.Module], step: int) -> None:
        count = len(models)
        if not known:
            known.extend(torch.stack([value] * count) for value in start())
        if step % every:
            return
        rows = torch.eye(count, dtype=torch.float64)
        weights = torch.full((2, 2), 0.5).double() if count == 2 else (rows + rows.roll(1, 0) + rows.roll(-1, 0)) / 3
        for number, group in enumerate(zip(*(model.parameters() for model in models), strict=True)):
            known[number] = known[number][:count]  # The last may have left.
            known[number] += torch.stack([code(own - k) for own, k in zip(group, known[number], strict=True)])
            moved = torch.tensordot(weights, known[number], 1) - known[number]
            for own, move in zip(group, moved, strict=True):
                own.add_(consensus * move)

    return exchange


@pytest.mark.parametrize(
    "name, replicas, consensus",
    [
        ("int8", 2, 1.0),
        pytest.param("bf16", 4, 0.9, marks=pytest.mark.slow),
        pytest.param("top-k", 4, 0.1, marks=pytest.mark.slow),
    ],
)
def test_coded_gossip(name: str, replicas: int, consensus: float) -> None:
    compression, code = CODES[name]
    sync = Gossip(compression=compression, consensus=consensus)
    found = trained(sync, (replicas,), data := batches(6, rows=3 * replicas))
    assert_same(found, simulated(choco(1, code, consensus), replicas, data))


_VALUES = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40)


@given(
    st.lists(_VALUES, min_size=1, max_size=4),
    st.sampled_from(sorted(CODES)),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_messages_say_what_the_code_leaves(values: list[list[float]], name: str, dtype: torch.dtype) -> None:
    compression, code = CODES[name]
    codec = codec_of(compression)
    assert codec is not None
    tensors = [torch.tensor(each, dtype=dtype) for each in values]
    message = pack(codec, tensors)
    assert message.dtype == torch.uint8 and message.numel() == sum(codec.size(each.numel()) for each in tensors)
    for found, own in zip(unpack(codec, message, tensors), tensors, strict=True):
        assert found.dtype == dtype
        if name == "top-k":  # Which of several equal ones is sent is open.
            assert (found - own).norm() <= own.norm() * math.sqrt(1 - 1 / own.numel()) * (1 + 1e-6) + 1e-6
        elif bool(own.abs().max() > 1e-30):
            torch.testing.assert_close(found, code(own))


def test_zeros_stay_zeros() -> None:
    for compression, _ in CODES.values():
        codec = codec_of(compression)
        assert codec is not None
        (found,) = unpack(codec, pack(codec, [torch.zeros(5)]), [torch.zeros(5)])
        assert torch.equal(found, torch.zeros(5))
