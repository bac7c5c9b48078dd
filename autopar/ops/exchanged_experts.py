"""A mixture-of-experts block whose tokens and experts are both sharded, over the same devices: rows travel.

Each device sorts its choices by the device that has the expert, and by expert. All-to-alls exchange first how many rows
each device sends for each expert, then the rows, with uneven splits, and after the products return the results to the
devices of their tokens. No row is dropped or padded: a device that is sent more than its share takes longer, and more
memory, than the price says.

A block is a generator that yields its :class:`Message` s and is sent what arrived, so that a runtime sends them by
collectives and a test runs all devices in lockstep. Every device sends the same messages in the same order, empty ones
too. Backward exchanges the rows again instead of saving them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import grouped_experts
from .activation import Activation
from .experts import Gradients, forward_rows, summed
from .grouped_experts import Groups, can_group


@dataclass(frozen=True)
class Message:
    """Rows [n, ...] of which the next ``sends[k]`` go to device k; ``receives[k]`` rows come from it."""

    rows: Tensor
    sends: Sequence[int]
    receives: Sequence[int]


Exchanging = Generator[Message, Tensor, Any]


@dataclass(frozen=True)
class Route:
    """Where the choices of this device go. ``order``: the choices that are sent, by device and expert; ``sends`` and
    ``receives``: rows to and from each device; ``arrived``: the received rows by expert; ``sizes`` [E]: how many each
    expert here gets."""

    order: Tensor
    sends: list[int]
    receives: list[int]
    arrived: Tensor
    sizes: Tensor

    def groups(self) -> Iterator[tuple[int, Tensor]]:
        """The experts here that get rows, and these."""
        for expert, rows in enumerate(self.arrived.split(self.sizes.tolist())):
            if len(rows):
                yield expert, rows

    @property
    def grouped(self) -> Groups:
        """The received rows in groups, once they are in the order ``arrived``."""
        return Groups(self.sizes.cumsum(0).to(torch.int32), len(self.arrived))

    def there(self, rows: Tensor) -> Message:
        """One row for each choice that is sent, to the devices of the experts."""
        return Message(rows.contiguous(), self.sends, self.receives)

    def back(self, rows: Tensor) -> Message:
        """One row for each received row, to the devices of the tokens."""
        return Message(rows.contiguous(), self.receives, self.sends)


def _route(ids: Tensor, starts: Sequence[int], experts: int) -> Generator[Message, Tensor, Route]:
    """``starts``: the first expert of each device; each has ``experts``. Choices of other experts are not sent."""
    flat, devices = ids.reshape(-1), len(starts)
    first = torch.tensor(starts, device=ids.device)
    device = torch.searchsorted(first, flat, right=True) - 1
    inside = flat - first[device.clamp(min=0)]
    known = (device >= 0) & (inside < experts)
    position = torch.where(known, device * experts + inside, devices * experts)
    counts = torch.bincount(position, minlength=devices * experts + 1)[:-1]
    arriving = yield Message(counts, [experts] * devices, [experts] * devices)
    # One transfer to the host, which needs all sizes.
    sent, received = torch.stack((counts, arriving)).view(2, devices, experts).sum(2).tolist()
    order = torch.argsort(position, stable=True)[: sum(sent)]
    expert = (
        torch.arange(experts, device=ids.device).repeat(devices).repeat_interleave(arriving, output_size=sum(received))
    )
    sizes = arriving.view(devices, experts).sum(0)
    return Route(order, sent, received, torch.argsort(expert, stable=True), sizes)


def exchanged_experts(
    x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    act: str, count: int, starts: Sequence[int],
) -> Exchanging:  # fmt: skip
    """The results [T, H] for the tokens of this device, with ``up`` [E, F, H] and ``down`` [E, H, I] of its experts."""
    route = yield from _route(ids, starts, up.shape[0])
    received = yield route.there(x[route.order // ids.shape[-1]])
    function, results = Activation.parse(act), received.new_empty(received.shape[0], down.shape[1])
    if can_group(received, up, down):
        groups, by_expert = route.grouped, received[route.arrived]
        results[route.arrived] = grouped_experts.forward(
            function, groups, by_expert, None, up, down, up_bias, down_bias
        )
    else:
        for expert, rows in route.groups():
            results[rows] = forward_rows(function, received[rows], up, down, up_bias, down_bias, expert)
    returned = yield route.back(results)
    weighted = returned * weights.reshape(-1)[route.order, None]
    return summed(weighted, route.order, ids.shape[-1], x)


def exchanged_experts_backward(
    grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None, act: str, count: int, starts: Sequence[int],
) -> Exchanging:  # fmt: skip
    """Gradients as of :func:`.experts.experts_backward`: of the tokens and weights of this device, of its experts."""
    route = yield from _route(ids, starts, up.shape[0])
    tokens, width = route.order // ids.shape[-1], x.shape[-1]
    both = yield route.there(torch.cat((x[tokens], grad[tokens]), 1))
    received, grad_out = both.split(width, 1)
    factors = yield route.there(weights.reshape(-1)[route.order])
    operands = Activation.parse(act), up, down, up_bias, down_bias
    grad_rows, grad_factors, of_experts = _of_rows(route, received, grad_out, factors, *operands)
    grad_x = summed((yield route.back(grad_rows)), route.order, ids.shape[-1], x)
    grad_weights = torch.zeros_like(weights).reshape(-1)
    grad_weights[route.order] = yield route.back(grad_factors)
    return grad_x, grad_weights.view_as(weights), *of_experts


def _of_rows(
    route: Route, rows: Tensor, grad_out: Tensor, factors: Tensor, function: Activation, up: Tensor, down: Tensor,
    up_bias: Tensor | None, down_bias: Tensor | None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Gradients of the received ``rows`` [n, H], of the ``factors`` [n] of their results, and of the experts here."""
    grad_rows, grad_factors = torch.empty_like(rows), torch.empty_like(factors)
    matrices = up, down, up_bias, down_bias
    if can_group(rows, up, down):
        order, groups = route.arrived, route.grouped
        found = grouped_experts.backward(function, groups, rows[order], grad_out[order], factors[order], *matrices)
        grad_rows[order], grad_factors[order] = found.rows, found.factors
        return grad_rows, grad_factors, found.of_experts
    sums = Gradients.zeros(*matrices)
    for expert, chosen in route.groups():
        grad_rows[chosen], grad_factors[chosen] = sums.add(
            function, *matrices, rows[chosen], grad_out[chosen], factors[chosen], expert
        )
    return grad_rows, grad_factors, sums.tensors


EXCHANGES: dict[str, Callable[..., Exchanging]] = {
    "exchanged_experts": exchanged_experts,
    "exchanged_experts_backward": exchanged_experts_backward,
}
"""The blocks that exchange, by the names that instructions and strategies have behind their namespaces."""


def message_bytes(name: str, inputs: Sequence[Any], devices: int) -> tuple[int, ...]:
    """Mean bytes that one of ``devices`` sends in each message of a block, if it sends all its choices.
    ``inputs``: its operands, or their local types."""
    backward = name.endswith("backward")
    x, ids, weights, up = inputs[backward : 4 + backward]
    rows, width, item = int(ids.shape[0]) * int(ids.shape[1]), int(x.shape[1]), x.dtype.itemsize
    row, factor = rows * width * item, rows * weights.dtype.itemsize
    counts = devices * int(up.shape[0]) * torch.int64.itemsize
    return (counts, 2 * row, factor, row, factor) if backward else (counts, row, row)


def run_lockstep(blocks: Sequence[Exchanging]) -> list[Any]:
    """The results of the blocks of all devices of an exchange, in one process."""
    messages, results = [next(block) for block in blocks], [None] * len(blocks)
    while True:
        parts = [message.rows.split(list(message.sends)) for message in messages]
        arrived = [torch.cat([each[index] for each in parts]) for index in range(len(blocks))]
        following: list[Message] = []
        for index, block in enumerate(blocks):
            try:
                following.append(block.send(arrived[index]))
            except StopIteration as end:
                results[index] = end.value
        if not following:
            return results
        messages = following
