"""Captures a recorded program as joint graphs: one of the whole program, in which each run of calls taken out of line
is a single operation with its own derivative, and one for each kind of such calls.

The operations are ``autopar_trace::forward(inputs, run)`` and ``autopar_trace::backward(gradients, run, received)``:
``received`` says which results got a gradient; the backward of equal calls depends on nothing else. :mod:`.convert`
replaces each by the graphs of its bodies. They neither take the state that is hidden in calls nor give its gradients;
if it requires any, a *token*, a parameter without elements, stands for all of it, so that autograd asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx, nn

from autopar.torch_internals.fake_tensors import FakeTensorMode, computed_again, symbols_among
from autopar.torch_internals.joint_graphs import (
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    described_outputs,
    descriptor_of,
    notes,
    set_notes,
    value_of,
)
from autopar.torch_internals.modules import buffers_of, parameters_of

from .outline import Body, Outlined, Received, Run, Site, format_of
from .record import PATH, PLACE, RecordedOp, Recording, Ref, UnrecordedError, replaced

_LIBRARY = torch.library.Library("autopar_trace", "FRAGMENT")
_LIBRARY.define("forward(Tensor[] inputs, int run) -> Tensor[]")
_LIBRARY.define("backward(Tensor[] gradients, int run, int[] received) -> Tensor[]")
FORWARD = torch.ops.autopar_trace.forward.default
BACKWARD = torch.ops.autopar_trace.backward.default
TOKEN = "token"

Sizes: TypeAlias = Mapping[sympy.Symbol, torch.SymInt]
Export = Callable[[nn.Module, Sequence[torch.Tensor]], fx.GraphModule]


@dataclass(frozen=True)
class BodyGraph:
    """The joint graph of a body, split into parts: placeholders of its inputs and of the gradients received; operations
    of its forward and of its backward; results, and the gradients of the inputs that have one."""

    graph_module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    gradients: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Bodies:
    """The calls of a captured program, the gradients each received, and the graph of each kind of call."""

    outlined: Outlined
    received: dict[int, Received]
    graphs: dict[tuple[int, Received], BodyGraph]

    def graph_of(self, site: Site) -> BodyGraph:
        return self.graphs[site.body.index, self.received.get(site.index, ())]

    def differentiable(self, site: Site) -> tuple[int, ...]:
        """The tensors that the :attr:`BodyGraph.gradients` of a call are gradients of."""
        inputs = self.outlined.differentiable(site.body, self.received.get(site.index, ()))
        return tuple(site.inputs[index] for index in inputs)


# The outlined program that is being captured: the two operations read their shapes from it. Not a context variable,
# since autograd may run backward in a thread of its own.
_CAPTURED: list[Outlined] = []


@contextmanager
def _capturing(outlined: Outlined) -> Iterator[None]:
    _CAPTURED.append(outlined)
    try:
        yield
    finally:
        _CAPTURED.pop()


def _like(numbers: Sequence[int]) -> list[torch.Tensor]:
    tensors = [_CAPTURED[-1].program.tensors[number] for number in numbers]
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]


def _forward(inputs: list[torch.Tensor], run: int) -> list[torch.Tensor]:
    return _like(_CAPTURED[-1].runs[run].outputs)


def _backward(gradients: list[torch.Tensor], run: int, received: list[int]) -> list[torch.Tensor]:
    outlined = _CAPTURED[-1]
    called = outlined.runs[run]
    flow = outlined.flow(called, tuple(received))
    tokens = [torch.empty(0, device=gradients[0].device)] if flow.learns else []
    return [*(torch.empty_like(tensor) for tensor in _like([called.inputs[i] for i in flow.inputs])), *tokens]


torch.library.register_fake("autopar_trace::forward", _forward, lib=_LIBRARY)
torch.library.register_fake("autopar_trace::backward", _backward, lib=_LIBRARY)


class _Outline(torch.autograd.Function):
    """The autograd function of a run; the last of ``inputs`` is its token, if it has one."""

    @staticmethod
    def forward(ctx: Any, run: Run, outlined: Outlined, *inputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.outlined = run, outlined
        results = FORWARD(list(inputs[: len(run.inputs)]), run.index)
        kinds = [outlined.program.tensors[number] for number in run.outputs]
        ctx.mark_non_differentiable(*(m for m, kind in zip(results, kinds, strict=True) if not kind.requires_grad))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        run: Run = ctx.run
        received = tuple(i for i, gradient in enumerate(gradients) if gradient is not None)
        flow = ctx.outlined.flow(run, received)
        input_gradients: list[torch.Tensor | None] = [None] * (len(run.inputs) + run.learns)
        if flow.received:
            results = [ctx.outlined.program.tensors[number] for number in run.outputs]
            pairs = zip(gradients, results, strict=True)
            incoming = [g.contiguous(memory_format=format_of(result)) for g, result in pairs if g is not None]
            computed = BACKWARD(incoming, run.index, list(received))
            places = (*flow.inputs, *((len(run.inputs),) if flow.learns else ()))
            for index, input_gradient in zip(places, computed, strict=True):
                input_gradients[index] = input_gradient
        return None, None, *input_gradients


def _run(step: RecordedOp, tensors: dict[int, torch.Tensor], sizes: Sizes, place: int | None) -> None:
    """Runs one operation again; records ``place`` on its nodes, if given, instead of its path. ``sizes``: what its
    numbers are made of."""

    def leaf(arg: Ref | torch.SymFloat) -> torch.Tensor | torch.SymFloat:
        return tensors[arg.number] if isinstance(arg, Ref) else computed_again(arg, sizes)

    operands = [tensors[number] for number in step.operands]
    if torch.is_grad_enabled() and tuple(tensor.requires_grad for tensor in operands) != step.requires_grad:
        raise UnrecordedError(f"{step.op} would have another derivative")
    note = {PATH: step.path} if place is None else {PLACE: place}
    before = notes()
    set_notes({**(before or {}), **note} if step.path is not None else before or {})
    grad_mode = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(grad_mode and step.grad_mode)
        kinds = Ref, torch.SymFloat
        args, kwargs = (replaced(arg, kinds, leaf) for arg in (step.args, tuple(step.kwargs.values())))
        output = step.op(*args, **dict(zip(step.kwargs, kwargs, strict=True)))
    finally:
        torch.set_grad_enabled(grad_mode)
        set_notes(before)
    results = output if isinstance(output, (tuple, list)) else (output,)
    for number, result in zip(step.results, results, strict=True):
        if number is not None:
            tensors[number] = result


class OutlinedModule(nn.Module):
    """The program with a single operation for each run; its parameters and buffers are those of ``like`` that are not
    hidden in runs, and the ``tokens`` of the runs that have one, by index."""

    def __init__(self, like: nn.Module, outlined: Outlined, tokens: Mapping[int, nn.Parameter]) -> None:
        super().__init__()
        hidden = {f"t{number - outlined.given}" for number in outlined.hidden}
        parameters_of(self).update({n: t for n, t in parameters_of(like).items() if n not in hidden})
        buffers_of(self).update({n: t for n, t in buffers_of(like).items() if n not in hidden})
        parameters_of(self).update({f"{TOKEN}{index}": token for index, token in tokens.items()})
        self.__dict__["outlined"] = outlined

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outlined: Outlined = self.__dict__["outlined"]
        program = outlined.program
        members: dict[str, Any] = {**parameters_of(self), **buffers_of(self)}
        shown = (number for number in range(outlined.given, program.inputs) if number not in outlined.hidden)
        tensors: dict[int, torch.Tensor] = dict(enumerate(inputs))
        tensors.update((number, members[f"t{number - outlined.given}"]) for number in shown)
        tensors.update(program.constants)
        sizes = symbols_among(inputs)
        for step in outlined.steps():
            if isinstance(step, Run):
                tokens = [members[f"{TOKEN}{step.index}"]] if step.learns else []
                results = _Outline.apply(step, outlined, *(tensors[number] for number in step.inputs), *tokens)
                tensors.update(zip(step.outputs, results, strict=True))
            else:
                _run(step, tensors, sizes, None)
        return tuple(tensors[number] for number in program.outputs)


class BodyModule(nn.Module):
    """A body on its own: a function of the tensors it takes from outside, after the first ``symbol_inputs`` inputs,
    which only introduce the symbols of the trace. Only the results ``received`` are differentiable."""

    def __init__(self, body: Body, symbol_inputs: int, received: Received) -> None:
        super().__init__()
        self.body, self.symbol_inputs, self.received = body, symbol_inputs, received

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = dict(zip(self.body.inputs, inputs[self.symbol_inputs :], strict=True))
        sizes = symbols_among(inputs[: self.symbol_inputs])
        for place, step in enumerate(self.body.instructions):
            _run(step, tensors, sizes, place)
        results = [tensors[number] for number in self.body.outputs]
        # Copies, so that no result is an input or another result.
        return tuple(t.clone() if i in self.received else t.detach().clone() for i, t in enumerate(results))


def capture_outlined(
    like: nn.Module,
    inputs: Sequence[torch.Tensor],
    outlined: Outlined,
    symbol_inputs: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    export: Export,
) -> tuple[fx.GraphModule, Bodies]:
    """The joint graph of the whole program, and those of the bodies. ``export`` captures a module called with fake
    inputs; ``symbol_inputs`` are fake inputs whose shapes contain every symbol."""
    with mode:
        tokens = {run.index: nn.Parameter(torch.empty(0)) for run in outlined.runs if run.learns}
    with _capturing(outlined):
        whole = export(OutlinedModule(like, outlined, tokens), inputs)
    received: dict[int, Received] = {}
    for node in whole.graph.nodes:
        if node.target is BACKWARD:
            _, run, results = node.args
            received.update(outlined.flow(outlined.runs[int(run)], tuple(results)).received)
    bodies = Bodies(outlined, received, {})
    for site in outlined.sites:
        key = site.body.index, received.get(site.index, ())
        if key not in bodies.graphs:
            bodies.graphs[key] = _body_graph(outlined, site.body, key[1], symbol_inputs, mode, export)
    return whole, bodies


def _body_graph(
    outlined: Outlined,
    body: Body,
    received: Received,
    symbol_inputs: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    export: Export,
) -> BodyGraph:
    program = outlined.program
    with mode:
        inputs = [_input_like(program.tensors[number]) for number in body.inputs]
    graph_module = export(BodyModule(body, len(symbol_inputs), received), (*symbol_inputs, *inputs))
    output = next(iter(reversed(graph_module.graph.nodes)))
    differentiable = outlined.differentiable(body, received)
    gradients: dict[int, fx.Node] = {}
    for node, described in described_outputs(output):
        match described:
            case GradAOTOutput(grad_of=PlainAOTInput(idx=index)) if node is not None:
                gradients[index - len(symbol_inputs)] = node
            case PlainAOTOutput() | GradAOTOutput() | None:
                pass
            case _:
                raise UnrecordedError(f"a call that also gives {described.expr()}")
    if tuple(sorted(gradients)) != differentiable:
        raise UnrecordedError("other gradients than those of the operations recorded")
    return _split(
        program, graph_module, body, len(symbol_inputs), received, tuple(gradients[index] for index in differentiable)
    )


def _split(
    program: Recording,
    graph_module: fx.GraphModule,
    body: Body,
    symbol_inputs: int,
    received: Received,
    gradients: tuple[fx.Node, ...],
) -> BodyGraph:
    nodes = list(graph_module.graph.nodes)
    inputs, tangents = _placeholders(nodes)
    for index, node in tangents.items():
        expected = format_of(program.tensors[body.outputs[index]])
        if not value_of(node).is_contiguous(memory_format=expected):
            raise UnrecordedError("a gradient with another memory format than its value")
    outputs = nodes[-1].args[0]
    results = [_original(node, index in received) for index, node in enumerate(outputs[: len(body.outputs)])]
    needed = _needed_for(results)
    last = max((i for i, node in enumerate(nodes) if node in needed), default=-1)
    operations = [node for node in nodes[:-1] if node.op != "placeholder"]
    order = {node: position for position, node in enumerate(nodes)}
    return BodyGraph(
        graph_module=graph_module,
        inputs=tuple(inputs[index] for index in sorted(inputs) if index >= symbol_inputs),
        tangents=tuple(tangents[index] for index in received),
        forward=tuple(node for node in operations if order[node] <= last),
        backward=tuple(node for node in operations if order[node] > last),
        results=tuple(results),
        gradients=gradients,
    )


def _placeholders(nodes: list[fx.Node]) -> tuple[dict[int, fx.Node], dict[int, fx.Node]]:
    """The placeholders: inputs, and tangents of outputs, by their index."""
    inputs: dict[int, fx.Node] = {}
    tangents: dict[int, fx.Node] = {}
    for node in nodes:
        match descriptor_of(node) if node.op == "placeholder" else None:
            case PlainAOTInput(idx=index):
                inputs[index] = node
            case TangentAOTInput(output=PlainAOTOutput(idx=index)):
                tangents[index] = node
    return inputs, tangents


def _original(node: fx.Node, differentiable: bool) -> fx.Node:
    """The node whose copy :class:`BodyModule` returned."""
    for op in (
        (torch.ops.aten.clone.default,)
        if differentiable
        else (torch.ops.aten.clone.default, torch.ops.aten.detach.default)
    ):
        if node.target is op and isinstance(node.args[0], fx.Node):
            node = node.args[0]
    return node


def _needed_for(results: Sequence[fx.Node]) -> set[fx.Node]:
    needed, waiting = set[fx.Node](), list(results)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


def _input_like(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return fake.requires_grad_() if tensor.requires_grad else fake
