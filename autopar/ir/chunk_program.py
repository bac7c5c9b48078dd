"""The program of one rank for one chunk of a pipeline (:mod:`autopar.ir.staged_graph`), run once for every microbatch.

Sections, each a function of local tensors (:class:`~autopar.ir.program.Section`):

=================== ============================================== ==================================================
``refresh``          stored parameters                              working parameters; once a step
``forward``          placeholders, ``receives``                     ``results``, ``sends``, saved values
``input_gradient``   saved values, ``tangents``,                    ``gradient_sends``, carried values
                     ``gradient_receives``
``weight_gradient``  carried values                                 raw gradients, one for each of ``gradients``
``backward``         what ``input_gradient`` takes                  ``gradient_sends``, raw gradients
``last``             see below                                      ``gradient_sends``, gradients in flight
``reduce``           gradients in flight                            ``gradients``, as stored; once a step
=================== ============================================== ==================================================

``input_gradient`` computes what other stages wait for, ``weight_gradient`` the remainder of backward, which a schedule
may postpone. ``backward`` does both, for schedules that do not split backward, and frees saved values as it goes. A raw
gradient has the placements that backward computes it in, often a partial sum: it is reduced once a step and not once a
microbatch.
``more_weight_gradient`` and ``more_backward`` are for microbatches after the first: their last inputs are the sums of
raw gradients so far, which they add to in place and return.
``last`` is for the last microbatch. It replaces whichever of these the schedule would run (``weight_gradient`` or
``backward``, if that microbatch is also the first). The reduction of each raw gradient starts as soon as its sum is
complete; if the rank has more to compute or to send, only as many start as need not wait for each other
(:meth:`.Schedule.ends_with`). ``reduce`` completes the others: it takes what ``last`` returns after
``gradient_sends``, including reductions that are still in flight.

Text forms: ``str`` shows the sections that differ in what they compute; :meth:`ChunkProgram.to_text` has all sections
and slots, and :meth:`ChunkProgram.from_text` reads it::

    # chunk 1, rank at (0,) of mesh (2,)
    parameter "w" = param "layers.1.weight": f32[4, 8] at (S(0))
    receive "h" = receive "h": f32[8, 4] at (S(0)) over 0>1
    ...
    refresh(%w):
      return %w
    ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.errors import GraphError

from .graph_text import text_lines
from .placements import Placements, parse_placements, short
from .program import Section, TensorSlot
from .program_text import SlotLine, parse_body, parse_integers, print_slot, slot_alone
from .staged_graph import Edge

# The field of a chunk's program -> the word its slots' lines begin with.
_SLOTS = {
    "parameters": "parameter",
    "placeholders": "placeholder",
    "receives": "receive",
    "results": "result",
    "sends": "send",
    "tangents": "tangent",
    "gradient_receives": "gradient_receive",
    "gradient_sends": "gradient_send",
    "gradients": "gradient",
}
_PORTS = ("receives", "sends", "gradient_receives", "gradient_sends")
# The names of its sections.
SECTIONS = (
    "refresh",
    "forward",
    "input_gradient",
    "weight_gradient",
    "backward",
    "more_weight_gradient",
    "more_backward",
    "last",
    "reduce",
)
_HEAD = re.compile(r"^# chunk (\d+), rank at (\([\d, ]*\)) of mesh (\([\d, ]*\))$")
_EDGE = re.compile(r"^over (\d+)>(\d+)(?: as (\(\S+\)))?$")


@dataclass(frozen=True, slots=True)
class Port:
    """An end of an edge, whose name is ``slot.target``: ``slot.placements`` are those of the wire, on the mesh inside
    this stage. Each rank exchanges its local tensor with the ranks of the other stage that have parts of it there
    (:mod:`autopar.ir.wire_pieces`): with its counterpart where both meshes are equal. ``other``: the placements on the
    other stage's mesh, if that is another."""

    edge: Edge
    slot: TensorSlot
    other: Placements | None = None

    @property
    def there(self) -> Placements:
        """The placements at the other end."""
        return self.slot.placements if self.other is None else self.other

    @property
    def tail(self) -> str:
        """The end of the port's line."""
        elsewhere = "" if self.other is None else f" as {short(self.other)}"
        return f"over {self.edge.source}>{self.edge.target}{elsewhere}"

    @staticmethod
    def of(line: SlotLine) -> Port:
        """The port that was read from text. Raises :class:`GraphError` if the line names no edge."""
        match = _EDGE.match(line.tail)
        if match is None:
            start = f"the line of {line.word} {line.slot.name!r}"
            raise GraphError(f"{start} ends with the chunks of its edge, as in over 0>1, not with {line.tail!r}")
        other = parse_placements(match[3]) if match[3] else None
        return Port(Edge(int(match[1]), int(match[2]), line.slot.target), TensorSlot(*line.slot), other)


@dataclass(frozen=True)
class ChunkProgram:
    """See the module docstring. ``mesh`` is the one inside a stage. ``parameters`` are all that the chunk uses,
    including those that another chunk owns (:attr:`Staged.owners <autopar.ir.staged_graph.Staged.owners>`)."""

    chunk: int
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    parameters: tuple[TensorSlot, ...]
    placeholders: tuple[TensorSlot, ...]
    receives: tuple[Port, ...]
    results: tuple[TensorSlot, ...]
    sends: tuple[Port, ...]
    tangents: tuple[TensorSlot, ...]
    gradient_receives: tuple[Port, ...]
    gradient_sends: tuple[Port, ...]
    gradients: tuple[TensorSlot, ...]
    refresh: Section
    forward: Section
    input_gradient: Section
    weight_gradient: Section
    backward: Section
    more_weight_gradient: Section
    more_backward: Section
    last: Section
    reduce: Section
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)

    @property
    def sections(self) -> tuple[Section, ...]:
        """The sections that show each computation and communication once; the others fuse them, or accumulate."""
        return (self.refresh, self.forward, self.input_gradient, self.weight_gradient, self.last, self.reduce)

    def __str__(self) -> str:
        head = f"# chunk {self.chunk}, rank at {self.coordinate} of mesh {self.mesh}"
        return "\n".join([head, *map(str, self.sections)]) + "\n"

    def to_text(self) -> str:
        """The text form, which :meth:`from_text` reads; constants print by name only."""
        head = f"# chunk {self.chunk}, rank at {self.coordinate} of mesh {self.mesh}"
        sections = (getattr(self, name).to_text() for name in SECTIONS)
        return "\n".join([head, *self._slot_lines(), *sections]) + "\n"

    def _slot_lines(self) -> Iterator[str]:
        for name, word in _SLOTS.items():
            for entry in getattr(self, name):
                if isinstance(entry, Port):
                    yield print_slot(word, entry.slot, entry.tail)
                else:
                    yield print_slot(word, entry)

    @staticmethod
    def from_text(text: str) -> ChunkProgram:
        """The program that :meth:`to_text` printed. Raises :class:`GraphError` naming the line."""
        lines = text_lines(text)
        head = _HEAD.match(lines[0]) if lines else None
        if head is None:
            raise GraphError('the program of a chunk starts with a line such as "# chunk 1, rank at (0,) of mesh (2,)"')
        body = parse_body("the program of a chunk", lines[1:], _SLOTS, SECTIONS)
        fields: dict[str, Any] = {name: Section.of(section) for name, section in body.sections.items()}
        for name, entries in body.slots.items():
            make = Port.of if name in _PORTS else _slot
            fields[name] = tuple(map(make, entries))
        return ChunkProgram(int(head[1]), parse_integers(head[3]), parse_integers(head[2]), **fields)


def _slot(line: SlotLine) -> TensorSlot:
    return TensorSlot(*slot_alone(line))
