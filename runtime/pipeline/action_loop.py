"""Runs one rank's list of actions (:mod:`autopar.schedule.schedule`) once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autopar.errors import ExecutionError
from autopar.ir.pipeline_program import PipelineProgram
from autopar.runtime.execute.gradient_reducer import Reduction
from autopar.runtime.torch_internals.profiling import span
from autopar.schedule.actions import Action, Kind, Message

from .chunk_executable import ChunkExecutable, Exchange, Messages
from .point_to_point import Arrival, Messenger
from .timeline_recorder import Recorder

# A chunk and a microbatch.
Task = tuple[int, int]
Inputs = Callable[[int, int], list[torch.Tensor]]


@dataclass
class PipelineRun:
    """The state of one run. ``inputs(chunk, microbatch)``: the placeholders of forward; ``tangents[chunk]``: those of
    backward. Values live from their computation or arrival to their use.

    Afterwards ``results`` has the results of forward by chunk and microbatch, and ``gradients[chunk]`` the gradients as
    stored, in the order of the chunk's program.
    """

    program: PipelineProgram
    chunks: Mapping[int, ChunkExecutable]
    messenger: Messenger
    inputs: Inputs
    tangents: Mapping[int, Sequence[torch.Tensor]]
    recorder: Recorder | None = None
    results: dict[Task, list[torch.Tensor]] = field(default_factory=dict)
    gradients: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    _arrivals: dict[Message, Arrival] = field(default_factory=dict)
    _leaving: dict[Message, list[torch.Tensor]] = field(default_factory=dict)
    _saved: dict[Task, list[torch.Tensor]] = field(default_factory=dict)
    _carried: dict[Task, list[torch.Tensor]] = field(default_factory=dict)
    _raw: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    _computed: dict[int, int] = field(default_factory=dict)
    _reducing: dict[int, tuple[Reduction, float]] = field(default_factory=dict)
    _began: float = 0.0

    def run(self) -> None:
        """Runs all actions of this rank; returns when all messages have been sent."""
        recorder = self.recorder
        listed = self.program.schedule.ranks[self.program.stage]
        to_come = sum(action.computes for action in listed)
        for action in listed:
            self._began = 0.0 if recorder is None else recorder.now()
            if action.computes:
                to_come -= 1
                for reduction, _ in self._reducing.values():
                    reduction.before_computation()
            if action.kind == "reduce":
                chunk = action.chunk
                self._reducing[chunk] = self.chunks[chunk].reduce(self._raw.pop(chunk), to_come), self._began
            else:
                with span(action):
                    self._do(action)
            if recorder is not None and not action.receives and action.kind not in ("reduce", "step"):
                recorder.add(action, self._began)
        self.messenger.finish()

    def _do(self, action: Action) -> None:
        match action.kind:
            case "forward":
                self._forward(action)
            case "input_gradient":
                self._input_gradient(action)
            case "weight_gradient":
                self._weight_gradient(action)
            case "backward":
                self._backward(action)
            case "send_forward" | "send_backward":
                message = action.message
                chunk = self.chunks[action.chunk]
                exchange = chunk.sends if message.direction == "forward" else chunk.gradient_sends
                crossings = next((several for peer, several in exchange if peer == message.target), ())
                self.messenger.send(self._leaving.pop(message), crossings, self.program.stage_of(message.target))
            case "receive_forward" | "receive_backward":
                self._receive(action)
            case "step":
                self._finish_reductions()
            case _:
                raise ExecutionError(f"the action {action} of kind {action.kind!r} is not known")

    def _forward(self, action: Action) -> None:
        chunk, task = self.chunks[action.chunk], (action.chunk, action.microbatch)
        values = self.inputs(*task)
        values += self._arrived(chunk.receives, action, "forward")
        self.results[task], messages, saved = chunk.forward(values)
        if self.program.schedule.training:
            self._saved[task] = saved
        self._give(messages, action, "forward")

    def _input_gradient(self, action: Action) -> None:
        chunk, task = self.chunks[action.chunk], (action.chunk, action.microbatch)
        messages, self._carried[task] = chunk.input_gradient(self._backward_inputs(action))
        self._give(messages, action, "backward")

    def _weight_gradient(self, action: Action) -> None:
        chunk, carried = action.chunk, self._carried.pop((action.chunk, action.microbatch))
        sums = self._raw.pop(chunk, [])
        self._raw[chunk] = self.chunks[chunk].weight_gradient(carried, sums, self._is_last(chunk))

    def _backward(self, action: Action) -> None:
        chunk = action.chunk
        taken, sums = self._backward_inputs(action), self._raw.pop(chunk, [])
        messages, self._raw[chunk] = self.chunks[chunk].backward(taken, sums, self._is_last(chunk))
        self._give(messages, action, "backward")

    def _is_last(self, chunk: int) -> bool:
        """Counts the chunk's weight gradients; whether the one about to be computed is that of the last microbatch."""
        self._computed[chunk] = self._computed.get(chunk, 0) + 1
        return self._computed[chunk] == self.program.microbatches

    def _backward_inputs(self, action: Action) -> list[torch.Tensor]:
        """The inputs of backward: saved values (this drops the last other reference to them), tangents and received
        gradients."""
        values = self._saved.pop((action.chunk, action.microbatch))
        values += self.tangents[action.chunk]
        values += self._arrived(self.chunks[action.chunk].gradient_receives, action, "backward")
        return values

    def _finish_reductions(self) -> None:
        for chunk, (reduction, began) in self._reducing.items():
            self.gradients[chunk] = reduction.finish()
            if self.recorder is not None:
                self.recorder.add(Action("reduce", chunk), began)
        self._reducing.clear()

    def _arrived(self, exchange: Exchange, action: Action, direction: str) -> list[torch.Tensor]:
        """Waits for the messages of other chunks to this one, in the order of its ports."""
        tensors: list[torch.Tensor] = []
        for peer, _ in exchange:
            message = _message(direction, peer, action.chunk, action.microbatch)
            if message not in self._arrivals:
                raise ExecutionError(f"{action} needs {message}, but the schedule has not received it")
            arrival = self._arrivals.pop(message)
            tensors += arrival.wait()
            if self.recorder is not None and arrival.works:
                kind: Kind = "receive_forward" if direction == "forward" else "receive_backward"
                receive = Action(kind, action.chunk, action.microbatch, peer)
                self.recorder.add(receive, self._began)
                self._began = self.recorder.now()
        return tensors

    def _give(self, messages: Messages, action: Action, direction: str) -> None:
        """Passes values to other chunks of this rank, and keeps those for other ranks until their send."""
        chunk, stage = action.chunk, self.program.stage
        for peer in self._peers(chunk, direction):
            message = _message(direction, chunk, peer, action.microbatch)
            tensors = messages.pop(peer, [])
            if self.program.stage_of(peer) == stage:
                self._arrivals[message] = Arrival(tensors)
            else:
                self._leaving[message] = tensors
        if messages:
            raise ExecutionError(f"chunk {chunk} has values for {list(messages)}, to which the schedule has no edge")

    def _peers(self, chunk: int, direction: str) -> list[int]:
        edges = self.program.schedule.edges
        if direction == "forward":
            return [edge.target for edge in edges if edge.source == chunk]
        return [edge.source for edge in edges if edge.target == chunk and edge.gradient]

    def _receive(self, action: Action) -> None:
        message, chunk = action.message, self.chunks[action.chunk]
        exchange = chunk.receives if message.direction == "forward" else chunk.gradient_receives
        crossings = next((several for peer, several in exchange if peer == message.source), ())
        self._arrivals[message] = self.messenger.receive(crossings, self.program.stage_of(message.source))


def _message(direction: str, source: int, target: int, microbatch: int) -> Message:
    return Message("forward" if direction == "forward" else "backward", source, target, microbatch)
