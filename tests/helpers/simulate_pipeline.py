"""Runs the chunk programs of all ranks of all stages in one process, by the action lists.

Messages are handed over as the schedule's model of communication says: untagged, first come first served from one
stage to another. Written apart from the runtime, as :mod:`.simulate` is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch

from autopar.ir.chunk_program import ChunkProgram
from autopar.ir.pipeline_program import PipelineProgram
from autopar.ir.placements import take_local
from autopar.ir.program import Section
from autopar.schedule.actions import Action, Message
from tests.helpers.simulate import Tensors, World

Shards = list[list[Any]]  # By rank inside a stage.
Results = dict[tuple[str, str], torch.Tensor]


class Stage:
    """The ranks of one pipeline stage, in lockstep."""

    def __init__(self, programs: Sequence[PipelineProgram]) -> None:
        self.programs = programs
        self.stage = programs[0].stage
        self.todo = deque(programs[0].schedule.ranks[self.stage])
        self.arrived: dict[Message, Shards] = {}
        self.posted: dict[int, deque[Message]] = {}
        self.leaving: dict[Message, Shards] = {}
        self.saved: dict[tuple[int, int], Shards] = {}
        self.carried: dict[tuple[int, int], Shards] = {}
        self.raw: dict[int, Shards] = {}
        self.made: dict[int, int] = {}
        self.results: dict[tuple[int, int], Tensors] = {}
        self.gradients: dict[tuple[int, str], list[torch.Tensor]] = {}
        self.working: dict[int, list[dict[str, torch.Tensor]]] = {}

    def chunk(self, index: int) -> list[ChunkProgram]:
        return [program.chunks[index] for program in self.programs]

    def run(self, chunk: int, section: str, inputs: Shards) -> Shards:
        chunks = self.chunk(chunk)
        sections: list[Section] = [getattr(one, section) for one in chunks]
        return World(chunks).run(sections, inputs)  # type: ignore[arg-type]


class Pipeline:
    """All stages, with a queue of messages between each two."""

    def __init__(self, programs: Sequence[PipelineProgram], values: Mapping[str, torch.Tensor]) -> None:
        first = programs[0]
        self.first, self.schedule = first, first.schedule
        meshes = first.meshes
        blocks = (meshes.ranks(stage) for stage in range(meshes.stages))
        self.stages = [Stage([programs[rank] for rank in block]) for block in blocks]
        assert [p.coordinate for p in programs] == [
            (stage, *place) for stage, mesh in enumerate(meshes.meshes) for place in product(*map(range, mesh))
        ]
        self.values = dict(values)
        if first.prelude is not None:
            self.values |= self._prelude()
        self.queues: dict[tuple[int, int], deque[tuple[Message, Shards]]] = {}

    def _prelude(self) -> Tensors:
        program = self.first.prelude
        assert program is not None
        known = {s.name: program.constants[s.name] if s.kind == "constant" else self.values[s.target]
                 for s in program.placeholders}  # fmt: skip
        (made,) = World([program]).run([program.forward], [[known[s.name] for s in program.placeholders]])
        return {slot.target: value for slot, value in zip(program.results, made, strict=False)}

    def step(self) -> Results:
        """Results and gradients by (kind, name), whole."""
        self._refresh()
        while any(stage.todo for stage in self.stages):
            moved = [self._advance(stage) for stage in self.stages]
            assert any(moved), "the stages wait for each other"
        assert not any(self.queues.values()), "messages nobody received"
        for stage in self.stages:
            assert not (stage.saved or stage.carried or stage.raw or stage.arrived or stage.leaving), "values left over"
        return {**self._outputs(), **self._gradients()}

    def _refresh(self) -> None:
        """Every chunk works with what the owner of a parameter stores."""
        for stage in self.stages:
            for index in stage.programs[0].chunks:
                stored = [
                    [take_local(self.values[s.target], s.placements, c.mesh, c.coordinate) for s in c.parameters]
                    for c in stage.chunk(index)
                ]
                made = stage.run(index, "refresh", stored)
                names = [slot.target for slot in stage.chunk(index)[0].parameters]
                stage.working[index] = [dict(zip(names, one, strict=True)) for one in made]

    def _advance(self, stage: Stage) -> bool:
        """Does what a stage can do before it has to wait; whether that was anything."""
        moved = False
        while stage.todo and self._do(stage, stage.todo[0]):
            stage.todo.popleft()
            moved = True
        return moved

    def _do(self, stage: Stage, action: Action) -> bool:
        kind = action.kind
        if kind in ("forward", "backward", "input_gradient") and not self._ready(stage, action):
            return False
        if kind == "forward":
            self._forward(stage, action)
        if kind in ("backward", "input_gradient"):
            self._backward(stage, action)
        if kind == "weight_gradient":
            self._weight_gradient(stage, action)
        if action.sends:
            message = action.message
            target = self.schedule.placement[message.target]
            self.queues.setdefault((stage.stage, target), deque()).append((message, stage.leaving.pop(message)))
        if action.receives:
            source = self.schedule.placement[action.peer]
            stage.posted.setdefault(source, deque()).append(action.message)
        if kind == "reduce":
            self._reduce(stage, action.chunk)
        return True

    def _needs(self, action: Action) -> list[Message]:
        chunk, microbatch = action.chunk, action.microbatch
        if action.kind == "forward":
            return [Message("forward", e.source, chunk, microbatch) for e in self.schedule.edges if e.target == chunk]
        edges = [e for e in self.schedule.edges if e.source == chunk and e.gradient]
        return [Message("backward", e.target, chunk, microbatch) for e in edges]

    def _ready(self, stage: Stage, action: Action) -> bool:
        """Matches posted receives with what has been sent, in order, and looks whether all is there."""
        for source, posted in stage.posted.items():
            queue = self.queues.get((source, stage.stage), deque())
            while posted and queue:
                message, shards = queue.popleft()
                assert message == posted.popleft(), "untagged messages in another order than their receives"
                stage.arrived[message] = self._across(stage, message, shards)
        return all(message in stage.arrived for message in self._needs(action))

    def _across(self, stage: Stage, message: Message, shards: Shards) -> Shards:
        """What the ranks of a stage receive of the ``shards`` that those of another sent: parts of the whole values."""
        forward = message.direction == "forward"
        target, source = stage.chunk(message.target), self._sender(message)
        if target[0].mesh == source[0].mesh:
            return shards
        ports = target[0].receives if forward else target[0].gradient_receives
        mine = [port for port in ports if port.edge.source == message.source]
        sent = {port.edge: port.slot for port in (source[0].sends if forward else source[0].gradient_sends)}
        received: Shards = [[] for _ in target]
        for position, port in enumerate(mine):
            slot = sent[port.edge]
            assert port.there == slot.placements
            parts = [[values[position]] for values in shards]
            (whole,) = World(source)._assemble([[slot]] * len(source), parts).values()  # type: ignore[arg-type]
            for chunk, values in zip(target, received, strict=True):
                values.append(take_local(whole, port.slot.placements, chunk.mesh, chunk.coordinate).contiguous())
        return received

    def _sender(self, message: Message) -> list[ChunkProgram]:
        return self.stages[self.schedule.placement[message.source]].chunk(message.source)

    def _arrived(self, stage: Stage, action: Action) -> Shards:
        messages = [stage.arrived.pop(message) for message in sorted(self._needs(action), key=lambda m: m.source)]
        return [[value for shards in messages for value in shards[rank]] for rank in range(len(stage.programs))]

    def _give(self, stage: Stage, action: Action, direction: Any, shards: Shards) -> None:
        chunk = stage.chunk(action.chunk)[0]
        ports = chunk.sends if direction == "forward" else chunk.gradient_sends
        if direction == "forward":
            peers = [e.target for e in self.schedule.edges if e.source == action.chunk]
        else:
            peers = [e.source for e in self.schedule.edges if e.target == action.chunk and e.gradient]
        assert {port.edge.target for port in ports} <= set(peers)
        for peer in peers:
            message = Message(direction, action.chunk, peer, action.microbatch)
            mine = [[v for port, v in zip(ports, values, strict=True) if port.edge.target == peer] for values in shards]
            where = stage.arrived if self.schedule.placement[peer] == stage.stage else stage.leaving
            where[message] = mine

    def _forward(self, stage: Stage, action: Action) -> None:
        index, k = action.chunk, action.microbatch
        received = self._arrived(stage, action)
        inputs = [
            [self._placeholder(stage, rank, index, k, slot) for slot in chunk.placeholders] + received[rank]
            for rank, chunk in enumerate(stage.chunk(index))
        ]
        made = stage.run(index, "forward", inputs)
        chunk = stage.chunk(index)[0]
        a, b = len(chunk.results), len(chunk.results) + len(chunk.sends)
        for values in made[1:]:
            for mine, other in zip(made[0][:a], values[:a], strict=True):
                torch.testing.assert_close(mine, other, equal_nan=True)
        stage.results[index, k] = {(s.kind, s.target): v for s, v in zip(chunk.results, made[0][:a], strict=True)}  # type: ignore[misc]
        self._give(stage, action, "forward", [values[a:b] for values in made])
        if self.schedule.training:
            stage.saved[index, k] = [values[b:] for values in made]

    def _placeholder(self, stage: Stage, rank: int, index: int, k: int, slot: Any) -> torch.Tensor:
        chunk = stage.chunk(index)[rank]
        if slot.kind == "param":
            return stage.working[index][rank][slot.target]
        whole = chunk.constants[slot.name] if slot.kind == "constant" else self.values[slot.target]
        if slot.kind == "input" and self.first.inputs[slot.target] is not None:
            whole = whole.chunk(self.first.microbatches, self.first.inputs[slot.target])[k]  # type: ignore[arg-type]
        if slot.kind == "random":
            whole = torch.cat([whole[:3], torch.tensor([k])])
        return take_local(whole, slot.placements, chunk.mesh, chunk.coordinate).clone(
            memory_format=torch.contiguous_format
        )

    def _backward(self, stage: Stage, action: Action) -> None:
        """Whole, or as far as the input gradient."""
        index, k = action.chunk, action.microbatch
        received, saved = self._arrived(stage, action), stage.saved.pop((index, k))
        inputs = []
        for rank, chunk in enumerate(stage.chunk(index)):
            ones = [
                take_local(torch.ones(s.shape, dtype=s.dtype), s.placements, chunk.mesh, chunk.coordinate)
                for s in chunk.tangents
            ]
            inputs.append([*saved[rank], *ones, *received[rank]])
        whole = action.kind == "backward"
        made = self._added(stage, index, "backward", inputs) if whole else stage.run(index, "input_gradient", inputs)
        count = len(stage.chunk(index)[0].gradient_sends)
        self._give(stage, action, "backward", [values[:count] for values in made])
        if whole:
            stage.raw[index] = [values[count:] for values in made]
        else:
            stage.carried[index, k] = [values[count:] for values in made]

    def _weight_gradient(self, stage: Stage, action: Action) -> None:
        index = action.chunk
        carried = stage.carried.pop((index, action.microbatch))
        stage.raw[index] = self._added(stage, index, "weight_gradient", carried)

    def _added(self, stage: Stage, index: int, section: str, inputs: Shards) -> Shards:
        """Adds to the gradients of earlier microbatches, in place, as the runtime does: aliases would show. Of the last
        microbatch they are on their way afterwards."""
        sums = stage.raw.pop(index, [[]] * len(inputs))
        name = f"more_{section}" if stage.made.get(index) else section
        stage.made[index] = stage.made.get(index, 0) + 1
        name = "last" if stage.made[index] == self.schedule.microbatches else name
        return stage.run(index, name, [[*given, *more] for given, more in zip(inputs, sums, strict=True)])

    def _reduce(self, stage: Stage, index: int) -> None:
        made = stage.run(index, "reduce", stage.raw.pop(index))
        for position, slot in enumerate(stage.chunk(index)[0].gradients):
            stage.gradients[index, slot.target] = [values[position] for values in made]

    def _gradients(self) -> Results:
        found: Results = {}
        for parameter in self.first.parameters:
            path, parts = parameter.slot.target, []
            for chunk in parameter.gradients:
                stage = self.stages[self.schedule.placement[chunk]]
                slots = stage.chunk(chunk)[0].gradients
                slot = next(s for s in slots if s.target == path)
                assert slot.placements == parameter.placed(chunk)
                world = World(stage.chunk(chunk))  # type: ignore[arg-type]
                shards = [[value] for value in stage.gradients[chunk, path]]
                parts.append(world._assemble([[slot]] * len(shards), shards)[path])
            if parts:
                found["gradient", path] = torch.stack(parts).sum(0)
        return found

    def _outputs(self) -> Results:
        found: Results = {}
        for result in self.first.results:
            stage = self.stages[self.schedule.placement[result.chunk]]
            key = (result.slot.kind, result.slot.target)
            parts = [stage.results[result.chunk, k][key] for k in range(self.first.microbatches)]  # type: ignore[index]
            if result.dim is not None:
                found[key] = torch.cat(parts, result.dim)
            else:
                found[key] = torch.stack(parts).sum(0) if result.combine == "sum" else parts[0]
            assert tuple(found[key].shape) == result.shape(self.first.microbatches)
        return found
