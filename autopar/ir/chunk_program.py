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
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .program import Section, TensorSlot
from .staged_graph import Edge


@dataclass(frozen=True, slots=True)
class Port:
    """An end of an edge: ``slot.placements`` are those of the wire, on the mesh inside a stage. Each rank exchanges its
    local tensor with the rank at the same coordinate of the other stage."""

    edge: Edge
    slot: TensorSlot


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
