"""The named schedules: what each rank computes, in which order, for p ranks, m microbatches and v chunks per rank.

==============  ======  ====================================================  ======================================
name            chunks  in flight on rank i, in (chunk, microbatch) pairs     source
==============  ======  ====================================================  ======================================
``gpipe``       any     v m                                                   Huang et al. 2019
``1f1b``        1       min(m, p - i)                                         Narayanan et al. 2019, 2021
``interleaved`` 2, ...  min(v m, (v - 1) g + 2 (p - i) - 1)                   Narayanan et al. 2021 (g below)
``zb-h1``       1       min(m, p)                                             Qi et al. 2023
``zb-v``        2       min(2 m, 2 p, m + i + 1)                              Qi et al. 2024
==============  ======  ====================================================  ======================================

If the forward, input gradient and weight gradient of every chunk take F, I and W, a step computes for m (F + I + W) and
idles for (p - 1)(F + I + W). Interleaved, with v times as many chunks, idles for a v-th of that (m >= p); ZB-H1 for
(p - 1)(F + I - W) if W <= F; ZB-V for (p - 1) F if F = I = W and m >= 2 p, until the first input arrives.

Interleaving was published for multiples of p: microbatches go through one chunk after the other in groups of p. Here m
microbatches are divided into max(1, m // p) groups, as evenly as possible, of at most g. Groups of p or more never wait
for themselves. GPipe with several chunks sends all microbatches through one chunk after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain as concatenate
from itertools import pairwise

from autopar.errors import ScheduleError

from .actions import Action, Edge
from .messages import Duration, Orders, complete, nominal_duration
from .schedule import Schedule, chain, loop_placement, v_placement

Order = list[Action]


def _forward(chunk: int, microbatch: int) -> Action:
    return Action("forward", chunk, microbatch)


def _backward(chunk: int, microbatch: int) -> Action:
    return Action("backward", chunk, microbatch)


def _split(chunk: int, microbatch: int) -> Order:
    return [Action("input_gradient", chunk, microbatch), Action("weight_gradient", chunk, microbatch)]


def _gpipe(rank: int, stages: int, microbatches: int, chunks: int) -> Order:
    held = range(rank, stages * chunks, stages)
    forwards = [_forward(chunk, b) for chunk in held for b in range(microbatches)]
    return forwards + [_backward(chunk, b) for chunk in reversed(held) for b in range(microbatches)]


def _alternate(forwards: Order, backwards: Order, warmup: int) -> Order:
    """``warmup`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    pairs = zip(forwards[warmup:], backwards, strict=False)
    return [*forwards[:warmup], *concatenate.from_iterable(pairs), *backwards[len(forwards) - warmup :]]


def _one_f_one_b(rank: int, stages: int, microbatches: int, chunks: int) -> Order:
    forwards = [_forward(rank, b) for b in range(microbatches)]
    return _alternate(forwards, [_backward(rank, b) for b in range(microbatches)], stages - rank - 1)


def _groups(stages: int, microbatches: int) -> list[range]:
    """Divides microbatches into groups as even as possible, none smaller than ``stages`` if possible."""
    count = max(1, microbatches // stages)
    starts = [microbatches * k // count for k in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def _interleaved_warmup(rank: int, stages: int, microbatches: int, chunks: int) -> int:
    largest = max(map(len, _groups(stages, microbatches)))
    return (chunks - 1) * largest + 2 * (stages - rank - 1)


def _interleaved(rank: int, stages: int, microbatches: int, chunks: int) -> Order:
    held = range(rank, stages * chunks, stages)
    groups = _groups(stages, microbatches)
    forwards = [_forward(chunk, b) for group in groups for chunk in held for b in group]
    backwards = [_backward(chunk, b) for group in groups for chunk in reversed(held) for b in group]
    return _alternate(forwards, backwards, _interleaved_warmup(rank, stages, microbatches, chunks))


def _zb_h1(rank: int, stages: int, microbatches: int, chunks: int) -> Order:
    """1F1B whose weight gradients come ``rank`` microbatches late, so that every rank has p in flight."""
    order = [_forward(rank, b) for b in range(min(microbatches, stages - rank))]
    for b in range(microbatches):
        order.append(Action("input_gradient", rank, b))
        if b >= rank:
            order.append(Action("weight_gradient", rank, b - rank))
        if b + stages - rank < microbatches:
            order.append(_forward(rank, b + stages - rank))
    late = range(max(0, microbatches - rank), microbatches)
    return order + [Action("weight_gradient", rank, b) for b in late]


def _zb_v(rank: int, stages: int, microbatches: int, chunks: int) -> Order:
    """Builds the order for at least 2 p - 1 microbatches, then leaves out those beyond ``microbatches``."""
    enough = max(2 * stages - 1, microbatches)
    down, up = rank, 2 * stages - 1 - rank
    ahead, begun = 2 * (stages - rank) - 1, rank
    order = [_forward(down, b) for b in range(ahead)]
    for b in range(rank):
        order += [_forward(up, b), _forward(down, ahead + b)]
    for b in range(stages - rank):
        order += [_forward(up, begun + b), *_split(up, b)]
    ahead, begun, steady = ahead + rank, stages, enough - stages
    for b in range(steady):
        order += [_forward(down, ahead + b)] if ahead + b < enough else []
        order += [*_split(down, b), _forward(up, begun + b), *_split(up, stages - rank + b)]
    order += _zb_v_end(rank, stages, enough)
    return [i for i in order if i.microbatch < microbatches]


def _zb_v_end(rank: int, stages: int, microbatches: int) -> Order:
    """The end of the order. Input gradients come first, since earlier ranks wait for them; weight gradients fill the
    remaining time."""
    down, up = rank, 2 * stages - 1 - rank
    order: Order = []
    for b in range(rank):
        order.append(Action("input_gradient", down, microbatches - stages + b))
        order.append(Action("input_gradient", up, microbatches - rank + b))
    weights = [Action("weight_gradient", down, b) for b in range(microbatches - stages, microbatches)]
    for b in range(stages - rank):
        order += [Action("input_gradient", down, microbatches - stages + rank + b), weights[b]]
    order += [Action("weight_gradient", up, b) for b in range(microbatches - rank, microbatches)]
    return order + weights[stages - rank :]


Generator = Callable[[int, int, int, int], Order]


@dataclass(frozen=True)
class Named:
    """A named schedule. ``order`` and ``in_flight`` take rank, stages, microbatches and chunks per rank. A rank may
    have ``least`` to ``most`` chunks (``most`` None: any number). ``delays``: weight gradients are computed later than
    input gradients."""

    order: Generator
    in_flight: Callable[[int, int, int, int], int]
    least: int = 1
    most: int | None = 1
    v_shaped: bool = False
    delays: bool = False

    def placement(self, stages: int, chunks: int) -> tuple[int, ...]:
        return v_placement(stages) if self.v_shaped else loop_placement(stages, chunks)


SCHEDULES: Mapping[str, Named] = {
    "gpipe": Named(_gpipe, lambda i, p, m, v: v * m, most=None),
    "1f1b": Named(_one_f_one_b, lambda i, p, m, v: min(m, p - i)),
    "interleaved": Named(
        _interleaved, lambda i, p, m, v: min(v * m, _interleaved_warmup(i, p, m, v) + 1), least=2, most=None
    ),
    "zb-h1": Named(_zb_h1, lambda i, p, m, v: min(m, p), delays=True),
    "zb-v": Named(_zb_v, lambda i, p, m, v: min(2 * m, 2 * p, m + i + 1), least=2, most=2, v_shaped=True, delays=True),
}


def chunks_allowed(name: str) -> tuple[int, int | None]:
    """The least and the most chunks per rank of the schedule ``name`` (None: any number). Raises
    :class:`ScheduleError`."""
    if name not in SCHEDULES:
        raise ScheduleError(f"no schedule is named {name!r}; one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name].least, SCHEDULES[name].most


# Chosen: a search asks for the same few schedules again and again; one of 64 stages and 512 microbatches has 50 MB.
@lru_cache(maxsize=8)
def make_schedule(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    edges: tuple[Edge, ...] | None = None,
    duration: Duration = nominal_duration,
    prefetch: bool = True,
) -> Schedule:
    """The schedule ``name`` for ``stages`` ranks with ``chunks`` chunks each (default: the fewest it can have).

    ``edges``: which chunk feeds which, by default a chain. ``duration`` decides the positions of messages, not the
    order of computations; ``prefetch``: whether receives are posted early. Raises :class:`ScheduleError`.
    """
    least, most = chunks_allowed(name)
    chunks = least if chunks is None else chunks
    if stages < 1 or microbatches < 1:
        raise ScheduleError(f"{stages} stages and {microbatches} microbatches: a schedule has at least one of each")
    if chunks < least or (most is not None and chunks > most):
        allowed = f"{least}" if most == least else f"{least} or more"
        raise ScheduleError(f"schedule {name!r} has {allowed} chunks per rank, not {chunks}")
    named = SCHEDULES[name]
    placement = named.placement(stages, chunks)
    edges = chain(len(placement)) if edges is None else edges
    orders: Orders = tuple(tuple(named.order(i, stages, microbatches, chunks)) for i in range(stages))
    promised = tuple(named.in_flight(i, stages, microbatches, chunks) for i in range(stages))
    return complete(name, orders, placement, edges, promised, duration, prefetch)
