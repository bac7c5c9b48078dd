"""Converts a captured torch.fx graph to a :class:`~autopar.ir.graph.Graph`: names, types, phases and module paths."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.errors import TraceError
from autopar.ir.graph import Graph
from autopar.ir.module_paths import with_modules
from autopar.ir.node import DTYPE_NAMES, Arg, Node, Output, TensorType, Value, symbol
from autopar.passes.base import with_phases
from autopar.torch_internals.joint_graphs import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    described_outputs,
    descriptor_of,
    value_of,
)
from autopar.torch_internals.operators import OpOverload

from .capture import CAPTURE_DEVICE, Captured, Request, module_path_of, place_of
from .explain_errors import SPARSE, defined_at
from .expressions import Expressions
from .lengths import BATCH, real_lengths
from .model_state import State
from .neutral_operations import Operation, neutral
from .outline import Outlined, Site
from .random_draws import number_draws
from .replay import BACKWARD, FORWARD, TOKEN, Bodies


def convert(captured: Captured, request: Request) -> Graph:
    """The graph of ``captured``. Raises :class:`TraceError` for a size that is known only at run time."""
    converter = _Converter(captured, request)
    converter.convert_nodes()
    real = {BATCH: request.call.batch, **real_lengths(request.lengths, request.call.tensors)}
    symbols = tuple((name, real[name]) for name in captured.symbols)
    graph = Graph(tuple(converter.nodes), tuple(converter.outputs()), symbols, converter.constants)
    return with_modules(with_phases(number_draws(graph).without_dead()), converter.unplaced).verify()


class _First(NamedTuple):
    """What an fx node became at first: ``suggestion``, of its name; the node; and the operands that fx has of it."""

    suggestion: str
    node: Node
    taken: tuple[Any, ...]


class _Converter:
    """Converts the fx nodes in order; ``values`` maps each to what it became."""

    def __init__(self, captured: Captured, request: Request) -> None:
        self.captured, self.request = captured, request
        self.expressions = Expressions({theirs: symbol(name) for name, theirs in captured.symbols.items()})
        self.values: dict[fx.Node, Any] = {}
        self.nodes: list[Node] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.names: set[str] = set()
        self.counts: dict[str, int] = {}  # Where the search for an unused name continues: names are never released.
        self.unplaced: set[str] = set()
        self.input_names = tuple(request.call.tensors)
        self.graph_module = captured.graph_module
        self.path_of = module_path_of
        self.inlined: dict[int, dict[fx.Node, Any]] = {}
        # Where calls are out of line: the model's state by its position; of what only calls use, the values and their
        # gradients by the program's numbers.
        self.state: dict[int, Value] = {}
        self.hidden: dict[int, Value] = {}
        self.gradients: dict[int, Any] = {}
        self.types: dict[int, tuple[TensorType, torch.Tensor]] = {}
        # Of what is in a body, which is converted once for each of its calls.
        self.firsts: dict[fx.Node, _First] = {}
        self.bases: dict[str, str] = {}  # By suggestion, of names.

    def convert_nodes(self) -> None:
        if self.captured.bodies is not None:
            self._place_state(self.captured.bodies.outlined)
        for node in self.captured.graph_module.graph.nodes:
            self._convert(node)

    def _place_state(self, outlined: Outlined) -> None:
        """Adds the model's state, of which the graph of the whole program has only some, in the order in which it has
        it all otherwise: parameters first."""
        entries = list(enumerate(self.request.state, outlined.given))
        for number, entry in sorted(entries, key=lambda item: item[1].role != "param"):
            self.state[number - outlined.given] = self._state(entry, outlined.program.tensors[number])
        self.hidden = {number: self.state[number - outlined.given] for number in outlined.hidden}

    def _convert(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.values[node] = self._placeholder(node)
        elif node.op == "get_attr":
            self.values[node] = self._constant(node)
        elif node.target is FORWARD:
            self.values[node] = self._forward_of(node)
        elif node.target is BACKWARD:
            self.values[node] = self._backward_of(node)
        elif node.op == "call_function":
            self.values[node] = self._call(node)

    def _forward_of(self, node: fx.Node) -> tuple[Any, ...]:
        """Inlines the forward operations of a run of calls, and returns its results."""
        inputs, index = self._arg(node.args)
        run = self._bodies.outlined.runs[index]
        known = {**self.hidden, **dict(zip(run.inputs, inputs, strict=True))}
        for site in run.sites:
            body = self._bodies.graph_of(site)
            self.inlined[site.index] = dict(zip(body.inputs, (known[number] for number in site.inputs), strict=True))
            known.update(zip(site.outputs, self._in_line(site, body.forward, body.results), strict=True))
        return tuple(known[number] for number in run.outputs)

    def _backward_of(self, node: fx.Node) -> tuple[Any, ...]:
        """Inlines the backward operations of a run, and returns the gradients of its inputs; those of the state hidden
        in it are kept."""
        gradients, index, received = self._arg(node.args)
        outlined = self._bodies.outlined
        run = outlined.runs[index]
        known = dict(zip((run.outputs[i] for i in received), gradients, strict=True))
        for site in reversed(run.sites):
            if site.index in self._bodies.received:
                body, own = self._bodies.graph_of(site), self._bodies.received[site.index]
                tangents = zip(body.tangents, (known[site.outputs[i]] for i in own), strict=True)
                self.inlined[site.index].update(tangents)
                results = self._in_line(site, body.backward, body.gradients)
                known.update(zip(self._bodies.differentiable(site), results, strict=True))
        self.gradients.update((number, known[number]) for number in known if number in outlined.hidden)
        flow = outlined.flow(run, received)
        return (*(known[run.inputs[i]] for i in flow.inputs), *((None,) if flow.learns else ()))

    def _in_line(self, site: Site, nodes: Sequence[fx.Node], results: Sequence[fx.Node]) -> tuple[Any, ...]:
        body = self._bodies.graph_of(site)

        def path_of(node: fx.Node) -> str | None:
            place = place_of(node)
            return None if place is None else site.paths[place]

        outside = self.values, self.graph_module, self.path_of
        self.values, self.graph_module, self.path_of = self.inlined[site.index], body.graph_module, path_of
        try:
            for node in nodes:
                self._convert(node)
            return tuple(self.values[node] for node in results)
        finally:
            self.values, self.graph_module, self.path_of = outside

    @property
    def _bodies(self) -> Bodies:
        assert self.captured.bodies is not None
        return self.captured.bodies

    def _name(self, suggestion: str) -> str:
        if suggestion not in self.bases:
            self.bases[suggestion] = re.sub(r"\W+", "_", suggestion)
        base = self.bases[suggestion]
        name, count = base, self.counts.get(base, 0)
        while name in self.names:
            count += 1
            name = f"{base}_{count}"
        self.names.add(name)
        self.counts[base] = count
        return name

    def _add(self, name: str, op: str, args: tuple[Arg, ...], value: Any, module: str | None, **kwargs: Any) -> Value:
        types = tuple(self._type(item) for item in (value if isinstance(value, (tuple, list)) else (value,)))
        node = Node(self._name(name), op, args, types=types, module=module or "", **kwargs)
        self.nodes.append(node)
        if module is None:
            self.unplaced.add(node.name)
        return Value(node.name)

    def _type(self, value: Any) -> TensorType | None:
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) not in self.types:
            # With the tensor, so that no other gets its identity.
            self.types[id(value)] = self._type_of(value), value
        return self.types[id(value)][0]

    def _type_of(self, value: torch.Tensor) -> TensorType:
        if value.dtype not in DTYPE_NAMES:
            raise TraceError(f"a tensor of dtype {value.dtype}: graphs know {', '.join(map(str, DTYPE_NAMES))}")
        if value.layout != torch.strided:
            raise TraceError(f"a tensor of layout {value.layout}; but {SPARSE}")
        return TensorType(tuple(map(self.expressions.size, value.shape)), value.dtype)

    def _placeholder(self, node: fx.Node) -> Value | None:
        described, value = descriptor_of(node), value_of(node)
        match described:
            case ParamAOTInput(target=target) if target.startswith(TOKEN):
                return None
            case ParamAOTInput(target=target) | BufferAOTInput(target=target):
                index = int(target[1:])
                return self.state.get(index) or self._state(self.request.state[index], value)
            case PlainAOTInput(idx=index):
                name = self.input_names[index]
                if name in self.request.call.resident:  # It has the path of the module that uses it.
                    return self._add(_placeholder_name("cache", name), "cache", (name,), value, None)
                return self._add(_placeholder_name("input", name), "input", (name,), value, "")
            case TangentAOTInput(output=PlainAOTOutput(idx=index)):
                name = self.captured.returned.order[index]
                return self._add(f"tangent_{name}", "tangent", (name,), value, "", phase="backward")
            case TangentAOTInput(output=InputMutationAOTOutput(mutated_input=ParamAOTInput(target=target))):
                name = self.request.state[int(target[1:])].name
                raise TraceError(
                    f"forward changes the parameter {name!r} in place, in sight of autograd; compute a new tensor from "
                    "it instead, or change it between steps"
                )
        raise TraceError(f"torch's tracer added an input that autopar does not know: {described.expr()}")

    def _state(self, entry: State, value: torch.Tensor) -> Value:
        owner = entry.name.rpartition(".")[0]
        placeholder = self._add(entry.name, entry.role, (entry.name,), value, owner)
        if entry.role == "constant":
            self.nodes[-1] = replace(self.nodes[-1], args=(placeholder.node,))
            self.constants[placeholder.node] = entry.tensor
        return placeholder

    def _constant(self, node: fx.Node) -> Value:
        attribute = _attribute(self.graph_module, str(node.target))
        if not isinstance(attribute, torch.Tensor):
            raise self._no_tensor(node, attribute)
        tensor = _real(attribute)
        value = value_of(node, tensor)
        if tensor.dim() == 0 and not tensor.is_meta and type(tensor) is torch.Tensor:
            options = (("dtype", tensor.dtype), ("device", self._device()))
            return self._add(
                "full", "aten.full.default", ((), tensor.item()), value, self.path_of(node), kwargs=options
            )
        name = self._name("constant")
        self.names.discard(name)
        placeholder = self._add(name, "constant", (name,), value, self.path_of(node))
        self.constants[placeholder.node] = tensor
        return placeholder

    def _no_tensor(self, node: fx.Node, value: object) -> TraceError:
        user = next(iter(node.users), node)
        constant = f"a {type(value).__name__} is used by {user.target}"
        where = defined_at(self.request.model, module_path_of(user) or "")
        return TraceError(
            f"{constant} {where}; but a graph holds only tensors and numbers; draw random numbers from torch's own "
            "generator (torch.manual_seed), or compute the tensor outside the model and keep it in a buffer"
        )

    def _call(self, node: fx.Node) -> Any:
        if node in self.firsts and (copy := self._copied(node, self.firsts[node])) is not None:
            return copy
        value = value_of(node)
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node) and isinstance(index, int)
            results = self.values[source]
            return Value(results.node, index) if isinstance(results, Value) else results[index]
        if isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.expressions.number(value)
        if not isinstance(node.target, OpOverload):
            raise TraceError(_no_operator(node))
        args = self._arg(node.args)
        kwargs = tuple((key, self._arg(arg)) for key, arg in node.kwargs.items())
        path, source = self.path_of(node), _source(node)
        try:
            call = neutral(Operation(node.name, str(node.target), args, kwargs))
            made = self._add(call.name, call.op, call.args, value, path, kwargs=call.kwargs, source=source)
            self.firsts.setdefault(node, _First(call.name, self.nodes[-1], self._taken(node)))
            return made
        except TraceError as error:
            where = f"{defined_at(self.request.model, path or '')}{f', at {source}' if source else ''}"
            raise TraceError(f"{node.target} {where} gives {error}") from error

    def _taken(self, node: fx.Node) -> tuple[Any, ...]:
        return tuple([self.values[each] for each in node.all_input_nodes])

    def _copied(self, node: fx.Node, first: _First) -> Value | None:
        """What ``node`` of a body is in another call of it: the node that it was at first, of other tensors. None if
        its operands do not correspond to those one by one."""
        taken, path = self._taken(node), self.path_of(node)
        if len(set(first.taken)) < len(taken) or any(type(value) is not Value for value in (*first.taken, *taken)):
            return None
        values = dict(zip(first.taken, taken, strict=True))
        made = first.node.of_values(self._name(first.suggestion), path or "", values)
        self.nodes.append(made)
        if path is None:
            self.unplaced.add(made.name)
        return Value(made.name)

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, fx.Node):
            return self.values[arg]
        if isinstance(arg, (tuple, list)):
            return tuple([self._arg(item) for item in arg])
        match arg:
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return self.expressions.number(arg)
            case torch.device():
                return self._device()
        return arg

    def _device(self) -> torch.device:
        """The device of the whole graph, that of the fake tensors it was traced on; a rank replaces it by its own."""
        return CAPTURE_DEVICE

    def outputs(self) -> Iterator[Output]:
        """Model outputs, mutations, then one gradient per parameter and per input that requires one."""
        values: dict[tuple[str, str], Value | None] = {}
        output = next(iter(reversed(self.captured.graph_module.graph.nodes)))
        for node, described in described_outputs(output):
            key = self._output_key(described)
            if key is not None:
                values[key] = self.values[node] if isinstance(node, fx.Node) else None
        for number, gradient in self.gradients.items():
            values["gradient", self.request.state[number - self._bodies.outlined.given].name] = gradient
        for kind, name in [("output", name) for name in self.captured.returned.order]:
            yield Output("output", name, values.get((kind, name)))
        for (kind, name), value in values.items():
            if kind == "mutation":
                yield Output("mutation", name, value)
        yield from self._gradients(values)

    def _gradients(self, values: dict[tuple[str, str], Value | None]) -> Iterator[Output]:
        if not self.request.grad:
            return
        for entry in self.request.state:
            if entry.role == "param":
                yield Output("gradient", entry.name, values.get(("gradient", entry.name)))
        for name, tensor in self.request.call.tensors.items():
            if tensor.requires_grad:
                yield Output("input_gradient", name, values.get(("input_gradient", name)))

    def _output_key(self, described: Any) -> tuple[str, str] | None:
        match described:
            case PlainAOTOutput(idx=index):
                return "output", self.captured.returned.order[index]
            case InputMutationAOTOutput(mutated_input=ParamAOTInput(target=target) | BufferAOTInput(target=target)):
                return "mutation", self._mutated(self.request.state[int(target[1:])])
            case InputMutationAOTOutput(mutated_input=PlainAOTInput(idx=index)):
                # The model has its own copy of its other inputs, which nothing reads afterwards.
                name = self.input_names[index]
                return ("mutation", name) if name in self.request.call.resident else None
            case GradAOTOutput(grad_of=ParamAOTInput(target=target)) if not target.startswith(TOKEN):
                return "gradient", self.request.state[int(target[1:])].name
            case GradAOTOutput(grad_of=PlainAOTInput(idx=index)):
                return "input_gradient", self.input_names[index]
            case GradAOTOutput() | None:
                return None
        raise TraceError(f"torch's tracer added an output that autopar does not know: {described.expr()}")

    @staticmethod
    def _mutated(entry: State) -> str:
        if entry.role == "constant":
            raise TraceError(
                f"forward changes the tensor {entry.name!r} in place, but it is a plain attribute; make it "
                f'a buffer: self.register_buffer("{entry.name.rpartition(".")[2]}", ...)'
            )
        return entry.name


def _no_operator(node: fx.Node) -> str:
    """The message for a call of something that is not an operator."""
    if "auto_functionalized" in str(node.target) and node.args:
        return (
            f"{node.args[0]} writes into its arguments ({_source(node) or 'in the model'}), but a graph has values "
            "that never change; let the operator return what it computes (mutates_args=()), and use that"
        )
    return f"the trace contains {node.target}, which is not an operator of a graph"


def _placeholder_name(prefix: str, name: str) -> str:
    return f"{prefix}_{name}" if name[:1].isdigit() else name


def _attribute(module: Any, path: str) -> object:
    for part in path.split("."):
        module = getattr(module, part)
    attribute: object = module
    return attribute


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The value of a constant; torch stores that of a small fake tensor in an attribute."""
    value = getattr(tensor, "constant", None)
    return value if isinstance(value, torch.Tensor) else tensor.detach()


def _source(node: fx.Node) -> str:
    """``file:line`` of the innermost recorded frame, if torch recorded any."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return ":".join(frames[-1]) if frames else ""
