"""Runs the programs of all ranks in one process, instruction by instruction, with collectives done by hand.

The semantics of collectives are written here a second time and in the plainest way, from the definition of placements,
so that a test of lowering does not rest on the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch

from autopar.ir.node import Arg, Value
from autopar.ir.placements import take_local, take_shard
from autopar.ir.program import Instruction, Program, Section, TensorSlot
from autopar.ops.exchanged_experts import EXCHANGES, run_lockstep
from autopar.ops.masked import LOCAL_OPS
from autopar.runtime.execute.randomness import set_state_of_generator, state_of_generator
from autopar.runtime.execute.torch_operations import returns_sequence

Tensors = dict[str, Any]


def resolve(op: str) -> Any:
    """The function behind ``aten.mm.default`` or ``autopar.masked_gather``."""
    if op in LOCAL_OPS:
        return LOCAL_OPS[op]
    namespace, name, overload = op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


class World:
    """The ranks of a mesh, with one program each, on one ``device``. Where several ranks have an element, their values
    may differ by ``apart``, relative and absolute."""

    def __init__(
        self,
        programs: Sequence[Program],
        device: torch.device | None = None,
        apart: tuple[float, float] = (1e-4, 1e-5),
    ) -> None:
        self.programs = list(programs)
        self.device, self.apart = device or torch.device("cpu"), apart
        self.mesh = programs[0].mesh
        self.coordinates = list(product(*map(range, self.mesh)))
        assert [p.coordinate for p in programs] == self.coordinates

    def group(self, rank: int, axes: Sequence[int]) -> list[int]:
        """The ranks that differ from ``rank`` only on ``axes``, row-major."""
        here = self.coordinates[rank]
        return [
            i
            for i, there in enumerate(self.coordinates)
            if all(a in axes or x == y for a, (x, y) in enumerate(zip(here, there, strict=True)))
        ]

    def step(self, values: Mapping[str, torch.Tensor], tangents: Mapping[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
        """Forward and backward on global ``values`` by placeholder target; results and gradients by name, assembled
        whole."""
        inputs = [self._inputs(rank, values) for rank in range(len(self.programs))]
        forward = self.run([p.forward for p in self.programs], inputs)
        count = len(self.programs[0].results)
        results = self._assemble([p.results for p in self.programs], [out[:count] for out in forward])
        if not self.programs[0].gradients:
            return results, {}
        saved = []
        for rank, program in enumerate(self.programs):
            given = [
                take_local(tangents[s.target], s.placements, self.mesh, program.coordinate).to(self.device)
                for s in program.tangents
            ]
            saved.append([*forward[rank][count:], *given])
        backward = self.run([p.backward for p in self.programs], saved)
        return results, self._assemble([p.gradients for p in self.programs], backward)

    def _inputs(self, rank: int, values: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        program = self.programs[rank]
        found = []
        for slot in program.placeholders:
            whole = program.constants[slot.name] if slot.kind == "constant" else values[slot.target]
            # Parameters may be stored in another dtype than they are read in; random states are read on the processor.
            whole = whole.to("cpu" if slot.kind == "random" else self.device, slot.dtype)
            found.append(
                take_local(whole, slot.placements, self.mesh, program.coordinate).clone(
                    memory_format=torch.contiguous_format
                )
            )
        return found

    def _assemble(self, slots: Sequence[Sequence[TensorSlot]], locals_: Sequence[Sequence[Any]]) -> Tensors:
        """Whole tensors from shards; every element must be the same wherever it is held."""
        found: Tensors = {}
        for position, slot in enumerate(slots[0]):
            places = torch.arange(torch.Size(slot.shape).numel()).reshape(slot.shape)
            first = locals_[0][position]
            wide = torch.complex128 if slot.dtype.is_complex else torch.float64
            whole = torch.full(slot.shape, float("nan"), dtype=wide)
            for rank, coordinate in enumerate(self.coordinates):
                where = take_local(places, slot.placements, self.mesh, coordinate).flatten()
                mine = locals_[rank][position].cpu()
                assert mine.numel() == where.numel(), (slot, mine.shape)
                flat = whole.view(-1)
                known = ~torch.isnan(flat[where])
                again = mine.to(wide).flatten()[known]
                torch.testing.assert_close(flat[where][known], again, rtol=self.apart[0], atol=self.apart[1])
                flat[where] = mine.to(wide).flatten()
            found[slot.name] = whole.to(first.dtype)
        return found

    def run(self, sections: Sequence[Section], inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """One section on every rank, in lockstep."""
        known: list[dict[Value, Any]] = [
            {Value(name): value for name, value in zip(section.inputs, given, strict=True)}
            for section, given in zip(sections, inputs, strict=True)
        ]
        for step in zip(*(section.instructions for section in sections), strict=True):
            results = self._execute(step, known)
            for rank, instruction in enumerate(step):
                several = results[rank] if _is_sequence(instruction) else [results[rank]]
                for index, value in enumerate(several):
                    known[rank][Value(instruction.name, index)] = value
        return [[None if v is None else known[r][v] for v in s.outputs] for r, s in enumerate(sections)]

    def _execute(self, step: Sequence[Instruction], known: list[dict[Value, Any]]) -> list[Any]:
        assert len({(i.name, i.op) for i in step}) == 1
        args = [self._fill(i.args, known[r]) for r, i in enumerate(step)]
        kwargs = [{k: self._fill(v, known[r]) for k, v in i.kwargs} for r, i in enumerate(step)]
        op = step[0].op
        if op in ("collective.wait", "host.store", "host.fetch"):
            return [a[0] for a in args]
        if op.startswith("collective."):
            return self._collective(op.removeprefix("collective."), args, kwargs)
        return self._local(op, args, kwargs)

    def _local(self, op: str, args: list[Any], kwargs: list[dict[str, Any]]) -> list[Any]:
        """One local operation on every rank; all draw the same random numbers."""
        state = state_of_generator(self.device)
        results = []
        for a, k in zip(args, kwargs, strict=True):
            set_state_of_generator(state, self.device)
            results.append(resolve(op)(*a, **k))
        return results

    def _fill(self, arg: Arg, known: Mapping[Value, Any]) -> Any:
        """``arg`` with values for names; a graph names the device of its trace."""
        if isinstance(arg, Value):
            return known[arg]
        if isinstance(arg, torch.device):
            return self.device
        return [self._fill(item, known) for item in arg] if isinstance(arg, tuple) else arg

    def _exchange(self, kind: str, args: list[Any], kwargs: list[dict[str, Any]]) -> list[Any]:
        """One block of experts on every rank."""
        found: list[Any] = [None] * len(args)
        for rank, kw in enumerate(kwargs):
            group = self.group(rank, kw["axes"])
            if rank == group[0]:
                blocks = [EXCHANGES[kind](*args[r], kwargs[r]["starts"]) for r in group]
                for r, result in zip(group, run_lockstep(blocks), strict=True):
                    found[r] = result
        return found

    def _collective(self, kind: str, args: list[Any], kwargs: list[dict[str, Any]]) -> list[Any]:
        if kind in EXCHANGES:
            return self._exchange(kind, args, kwargs)
        if kind.endswith("_bucket"):
            members = []
            for position in range(len(args[0][0])):
                single = [
                    {
                        k[:-1] if k in ("dims", "sizes", "befores") else k: v[position]
                        if k in ("dims", "sizes", "befores")
                        else v
                        for k, v in kw.items()
                    }
                    for kw in kwargs
                ]
                members.append(
                    self._collective(kind.removesuffix("_bucket"), [(a[0][position],) for a in args], single)
                )
            return [[member[rank] for member in members] for rank in range(len(args))]
        found = []
        for rank, kw in enumerate(kwargs):
            group = self.group(rank, kw["axes"])
            # Kernels may count on what a collective returns being contiguous.
            found.append(_one(kind, [args[r][0] for r in group], group.index(rank), kw).contiguous())
        return found


def _is_sequence(instruction: Instruction) -> bool:
    """Whether what an instruction gives is a list of results rather than the only one."""
    local = not instruction.op.startswith("collective.")
    return instruction.results > 1 or (local and returns_sequence(resolve(instruction.op)))


def _one(kind: str, pieces: list[torch.Tensor], index: int, kw: Mapping[str, Any]) -> torch.Tensor:
    """What the member at ``index`` of a group gets; ``pieces`` are what its members give."""
    n = len(pieces)
    if kind == "slice":
        return take_shard(pieces[index], kw["dim"], kw["before"], n, index, tuple(kw.get("shares", ()))).contiguous()
    if kind == "partial":
        return pieces[index] if index == 0 else torch.zeros_like(pieces[index])
    if kind == "all_gather":
        return _join(pieces, kw["dim"], kw["before"], kw["size"])
    if kind == "all_to_all":
        whole = _join(pieces, kw["gather_dim"], kw["gather_before"], kw["gather_size"])
        return take_shard(whole, kw["scatter_dim"], kw["scatter_before"], n, index, tuple(kw.get("scatter_shares", ())))
    stacked = torch.stack([p.clone() for p in pieces])
    total = {"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin, "avg": stacked.mean}[kw["op"]](0)
    total = total.to(pieces[0].dtype)
    if kind != "reduce_scatter":
        return total
    return take_shard(total, kw["dim"], kw["before"], n, index, tuple(kw.get("shares", ())))


def _join(pieces: list[torch.Tensor], dim: int, before: int, size: int) -> torch.Tensor:
    split = [p.unflatten(dim, (before, p.shape[dim] // before)) for p in pieces]
    whole = torch.cat(split, dim + 1).flatten(dim, dim + 1)
    assert whole.shape[dim] == size, (whole.shape, dim, size)
    return whole
