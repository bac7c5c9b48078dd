"""Programs of single ranks of a large mesh, and whether what they start matches, without processes.

A plan for a thousand devices cannot be executed here. What can go wrong between its ranks is that one starts a
collective that another does not start, or starts later, and that a message has no receive, or one of another size.
:func:`unfold` lowers the programs of ranks that are spread over the mesh, and of ranks that these exchange something
with, and writes down what each starts in a step (:mod:`autopar.runtime.rehearse.transcript`). :func:`unmatched`
compares that, event by event.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.api import LossFunction
from autopar.arguments import Batch, split_batch
from autopar.cluster.description import Cluster
from autopar.compiler.several_ranks import AnyProgram, SeveralRanks
from autopar.ir.chunk_program import SECTIONS
from autopar.ir.placements import index_of
from autopar.ir.program import Program, Section
from autopar.options import Options
from autopar.plans.plan import Plan
from autopar.plans.views.quantities import trim
from autopar.runtime.calls.compiled import Request
from autopar.runtime.comm.groups import AxisGroup
from autopar.runtime.rehearse.transcript import Event, Received, Sent, Started, transcript

Transcripts = Mapping[int, Sequence[Event]]
# How many differences are listed. Chosen: the first ones say most.
_LISTED = 20
# How many are printed, in lines of so many characters. Chosen: what fits on a screen.
_SHOWN, _LINE = 5, 150


@dataclass(frozen=True, repr=False)
class Unfolded:
    """What some ranks start in a step, by rank. ``sampled``: those that were asked for; all others are there to be
    compared with these. ``programs``: what they run. ``unmatched``: what does not match, a sentence each. ``print``
    shows a summary and the first of these; ``transcripts`` has the events."""

    sampled: tuple[int, ...]
    transcripts: Transcripts
    unmatched: tuple[str, ...]
    programs: Mapping[int, AnyProgram]

    def __repr__(self) -> str:
        return (
            f"Unfolded({len(self.transcripts)} ranks, {self.events} events, "
            f"{f'{len(self.unmatched)} unmatched' if self.unmatched else 'all matched'})"
        )

    def __str__(self) -> str:
        ranks, others = len(self.sampled), len(self.transcripts) - len(self.sampled)
        with_peers = f" and {others} that these exchange something with" if others else ""
        lines = [f"{ranks} ranks{with_peers} start {self.events} collectives and messages in a step"]
        if not self.unmatched:
            return f"{lines[0]}: all match"
        lines += [trim(text, _LINE) for text in self.unmatched[:_SHOWN]]
        rest = len(self.unmatched) - _SHOWN
        return "\n  ".join([f"{lines[0]}: {len(self.unmatched)} do not match", *lines[1:], *_more(rest)])

    @property
    def ok(self) -> bool:
        return not self.unmatched

    @property
    def events(self) -> int:
        """Of all ranks together."""
        return sum(map(len, self.transcripts.values()))


def _more(count: int) -> Iterator[str]:
    if count > 0:
        yield f"{count} more in .unmatched"


def unfold(
    model: nn.Module,
    plan: Plan,
    batch: Batch,
    *,
    cluster: str | Cluster,
    ranks: Sequence[int] | None = None,
    loss_fn: LossFunction | None = None,
    targets: Any = None,
) -> Unfolded:
    """Compares what ``ranks`` (default: ten, :func:`spread_ranks`) start in a step under ``plan``, with each other and
    with the ranks of :func:`peers`. ``model`` and ``batch`` are those that were planned, on any device, the meta device
    included; ``cluster`` is the one that the plan was priced on.

    Raises:
        PlanMismatchError: the plan is not for this model and batch.
    """
    args, kwargs = split_batch(batch, targets)
    request = Request(args, kwargs, training=True, grad=True, outputs="loss")
    compiler = _compiler(model, plan, Cluster.get(cluster), loss_fn)
    sampled = spread_ranks(plan) if ranks is None else tuple(dict.fromkeys(ranks))

    programs = {rank: compiler.program(request, rank) for rank in sampled}
    found = {rank: transcript(program) for rank, program in programs.items()}
    for rank in peers(found):
        programs[rank] = compiler.program(request, rank)
        found[rank] = transcript(programs[rank])
    return Unfolded(sampled, found, (*disagreeing(programs), *unmatched(found)), programs)


def _compiler(model: nn.Module, plan: Plan, cluster: Cluster, loss_fn: LossFunction | None) -> SeveralRanks:
    return SeveralRanks(
        model=model,
        mesh=(plan.stage_meshes.devices,),
        axis_names=(),
        cluster=cluster,
        options=Options(precision=plan.precision),
        device=torch.device("cpu"),
        ranks=AxisGroup(None, 1, 0),
        loss_fn=loss_fn,
        plan=plan,
    )


def spread_ranks(plan: Plan, count: int = 10) -> tuple[int, ...]:
    """``count`` ranks, or all if there are fewer, ascending: the first and the last, the corners at the ends of each
    axis and those opposite, the middle, and more at equal distances."""
    mesh = plan.stage_meshes.whole
    last = tuple(size - 1 for size in mesh)
    ends = [tuple(end if at == axis else 0 for at, end in enumerate(last)) for axis in range(len(mesh))]
    opposite = [tuple(end - own for end, own in zip(last, corner, strict=True)) for corner in ends]
    places = [(0,) * len(mesh), last, *ends, *opposite, tuple(size // 2 for size in mesh)]
    devices = math.prod(mesh)
    evenly = (devices * (2 * part + 1) // (2 * count) for part in range(count))
    found = dict.fromkeys((*(index_of(place, mesh) for place in places), *evenly, *range(devices)))
    return tuple(sorted(itertools.islice(found, count)))


def peers(transcripts: Transcripts) -> tuple[int, ...]:
    """The ranks needed beside those of ``transcripts`` for each to be compared with another: a further member of every
    group of its collectives, and every rank that it sends to or receives from."""
    needed: set[int] = set()
    for rank, events in transcripts.items():
        needed.update(event.peer for event in events if not isinstance(event, Started))
        for group in {event.group for event in events if isinstance(event, Started)}:
            others = [member for member in group if member != rank]
            if others and needed.isdisjoint(others) and transcripts.keys().isdisjoint(others):
                # The one next to it: a slip in the order of ranks shows there first.
                needed.add(others[group.index(rank) % len(others)])
    return tuple(sorted(needed - transcripts.keys()))


def disagreeing(programs: Mapping[int, AnyProgram]) -> tuple[str, ...]:
    """Ranks whose programs differ from those of the first, or from those of the first of their stage, in what all of
    these must have alike: the schedule, who has which parameters and results; which tensors are communicated, in which
    order. (Sizes and messages are what :func:`unmatched` compares.)"""
    firsts: dict[Any, tuple[int, Any]] = {}
    found = []
    for rank, program in sorted(programs.items()):
        for scope, facts in _alike(program):
            first, expected = firsts.setdefault(scope, (rank, facts))
            if facts != expected:
                found.append(f"the programs of ranks {first} and {rank} differ in {scope}")
    return tuple(found[:_LISTED])


def _alike(program: AnyProgram) -> Iterator[tuple[str, Any]]:
    """What a program must have in common with others, by what it is called."""
    if isinstance(program, Program):
        yield "their collectives", [_communications(section) for section in program.sections]
        return
    yield "what all ranks know", (program.meshes, program.schedule, program.parameters, program.results, program.inputs)
    for index, chunk in program.chunks.items():
        ports = (chunk.receives, chunk.sends, chunk.gradient_receives, chunk.gradient_sends)
        sections = (getattr(chunk, name) for name in SECTIONS)
        yield f"chunk {index}", (ports, [_communications(section) for section in sections])


def _communications(section: Section) -> list[tuple[Any, ...]]:
    """The collectives of a section: the names of their results and operands, and the axes."""
    given = ((i, dict(i.kwargs)) for i in section.instructions)
    return [(i.name, i.op, i.operands, kwargs["axes"]) for i, kwargs in given if "axes" in kwargs]


def unmatched(transcripts: Transcripts) -> tuple[str, ...]:
    """What any two of the ranks start that does not match, one per line: collectives over groups that have both must be
    the same in the same order, and the k-th tensor that one sends to the other the k-th that this receives."""
    found = itertools.chain.from_iterable(
        _unmatched_pair((one, transcripts[one]), (other, transcripts[other]))
        for one, other in itertools.combinations(sorted(transcripts), 2)
    )
    return tuple(itertools.islice(found, _LISTED))


_Rank = tuple[int, Sequence[Event]]


def _unmatched_pair(one: _Rank, other: _Rank) -> Iterator[str]:
    (a, first), (b, second) = one, other
    yield from _difference(f"rank {a} starts", _shared(first, b), f"rank {b} starts", _shared(second, a))
    for sender, receiver, sending, receiving in ((a, b, first, second), (b, a, second, first)):
        yield from _difference(
            f"rank {sender} sends to rank {receiver}",
            [(e.what, e.dtype, e.shape) for e in sending if isinstance(e, Sent) and e.peer == receiver],
            f"rank {receiver} receives",
            [(e.what, e.dtype, e.shape) for e in receiving if isinstance(e, Received) and e.peer == sender],
        )


def _shared(events: Sequence[Event], other: int) -> list[Started]:
    return [event for event in events if isinstance(event, Started) and other in event.group]


def _difference(one: str, mine: Sequence[Any], other: str, its: Sequence[Any]) -> Iterator[str]:
    """The first place where two lists differ."""
    for place, (here, there) in enumerate(itertools.zip_longest(mine, its)):
        if here != there:
            yield f"{one} as its {place + 1}. {here or 'nothing'}, {other} {there or 'nothing'}"
            return
