"""A trace as text, and the text as a trace of another model of the same kind.

The text has only the results of tracing. What the call and the model determine (names of inputs and parameters, the
values of their constants) is taken from the call and the model at hand, which are equal, since the key is
(:mod:`.key`). Nothing in the text is run.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import safetensors.torch
import sympy
import torch

from autopar.ir.graph import Graph
from autopar.ir.node import Node
from autopar.ir.signature import Signature
from autopar.torch_internals.trees import treespec_dumps, treespec_loads
from autopar.trace.call import Returned
from autopar.trace.capture import Request
from autopar.trace.guards.read_names import Names, guards_by_name, same_guards
from autopar.trace.tracer import Traced, traced_call

from .expression_json import expression_from_data, expression_to_data

# Every field of the parts of a trace. A new field that is missing here makes every entry uncacheable: decide how its
# value is stored.
FIELDS: Mapping[type, frozenset[str]] = {
    Traced: frozenset(
        ("graph", "signature", "parameters", "buffers", "guards", "notes", "reads", "read_names", "counted")
    ),
    Signature: frozenset(
        (
            *("input_spec", "input_names", "output_spec", "output_names", "loss", "differentiable"),
            *("constants", "output_constants", "lost", "tied", "training"),
        )
    ),
    Graph: frozenset(("nodes", "outputs", "symbols", "constants", "strategies", "classes")),
    Node: frozenset(("name", "op", "args", "kwargs", "types", "module", "source", "phase")),
}
_PLAIN = (type(None), bool, int, float, str)


class Uncacheable(Exception):
    """A trace that has no text; the message says why."""


@dataclass(frozen=True)
class Entry:
    """The results of a trace. ``graph`` has the constants that tracing created; ``held`` maps the other constants to
    the names of the model's tensors."""

    graph: Graph
    held: Mapping[str, str]
    returned: Returned
    guards: tuple[sympy.Basic, ...]
    notes: tuple[str, ...]
    read_names: Names
    counted: tuple[str, ...]

    @staticmethod
    def of(traced: Traced, request: Request) -> Entry:
        """The entry of a trace. Raises :class:`Uncacheable`."""
        for kind, names in FIELDS.items():
            unknown = {field.name for field in fields(kind)} ^ names
            if unknown:
                raise Uncacheable(f"{kind.__name__} has other fields than are stored: {sorted(unknown)}")
        own = {id(s.tensor): s.name for s in request.state if s.role == "constant"}
        held = {name: own[id(t)] for name, t in traced.graph.constants.items() if id(t) in own}
        created = {name: t for name, t in traced.graph.constants.items() if name not in held}
        signature = traced.signature
        returned = Returned(
            spec=signature.output_spec,
            names=signature.output_names,
            constants=dict(signature.output_constants),
            lost=dict(signature.lost),
            loss=signature.loss,
            differentiable=signature.differentiable,
        )
        graph = replace(traced.graph, constants=created)
        return Entry(graph, held, returned, traced.guards, traced.notes, traced.read_names, traced.counted)

    def bind(self, request: Request) -> Traced:
        """The trace of ``request``. Raises ValueError if its model has other constants."""
        own = {s.name: s.tensor for s in request.state if s.role == "constant"}
        if not set(self.held.values()) <= own.keys():
            raise ValueError("the model has other constants")
        held = {name: own[place] for name, place in self.held.items()}
        created = dict(self.graph.constants)
        order = {n.target: None for n in self.graph.nodes if n.op == "constant"}
        constants = {
            name: tensor for name in order for tensor in ({**held, **created}.get(name),) if tensor is not None
        }
        graph = replace(self.graph, constants={**constants, **held, **created})
        reads = guards_by_name(request.model, request.loss_fn, self.read_names)
        traced = traced_call(request, self.returned, graph, self.guards, self.notes)
        return replace(traced, reads=reads, read_names=self.read_names, counted=self.counted)

    def to_text(self) -> str:
        """The text form, which :meth:`from_text` reads. Raises :class:`Uncacheable`."""
        returned = self.returned
        assert returned.spec is not None
        try:
            data = {
                "graph": self.graph.to_text(),
                "sources": [node.source for node in self.graph.nodes],
                "made": base64.b64encode(safetensors.torch.save(_whole(self.graph.constants))).decode(),
                "held": dict(self.held),
                "output_spec": treespec_dumps(returned.spec),
                "output_names": returned.names,
                "output_constants": {str(i): _constant(value) for i, value in returned.constants.items()},
                "lost": dict(returned.lost),
                "loss": returned.loss,
                "differentiable": returned.differentiable,
                "guards": [expression_to_data(guard) for guard in self.guards],
                "notes": self.notes,
                "read_names": self.read_names,
                "counted": self.counted,
            }
            return json.dumps(data)
        except (ValueError, TypeError, KeyError, NotImplementedError, RuntimeError) as error:
            raise Uncacheable(f"{type(error).__name__}: {error}") from error

    @staticmethod
    def from_text(text: str) -> Entry:
        """The inverse of :meth:`to_text`. Raises various errors if ``text`` is not an entry."""
        data = json.loads(text)
        graph = Graph.from_text(data["graph"])
        nodes = tuple(replace(n, source=str(s)) for n, s in zip(graph.nodes, data["sources"], strict=True))
        returned = Returned(
            spec=treespec_loads(data["output_spec"]),
            names=tuple(data["output_names"]),
            constants={int(i): value for i, value in data["output_constants"].items()},
            lost={str(name): str(kind) for name, kind in data["lost"].items()},
            loss=data["loss"],
            differentiable=tuple(data["differentiable"]),
        )
        return Entry(
            graph=replace(graph, nodes=nodes, constants=safetensors.torch.load(base64.b64decode(data["made"]))),
            held=dict(data["held"]),
            returned=returned,
            guards=tuple(map(expression_from_data, data["guards"])),
            notes=tuple(data["notes"]),
            read_names=tuple((str(owner), str(name)) for owner, name in data["read_names"]),
            counted=tuple(data["counted"]),
        )


def _whole(constants: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Constants as safetensors takes them: on the CPU, contiguous, no two sharing memory."""
    for name, tensor in constants.items():
        if type(tensor) is not torch.Tensor or tensor.is_meta or tensor.requires_grad:
            raise ValueError(f"the constant {name} is not a plain tensor with values")
    return {name: tensor.cpu().contiguous().clone() for name, tensor in constants.items()}


def _constant(value: Any) -> Any:
    if type(value) not in _PLAIN:
        raise ValueError(f"the model returns a {type(value).__name__}")
    return value


def differences(first: Traced, second: Traced) -> list[str]:
    """The fields in which two traces differ, including the source lines of nodes and the values of constants."""
    fields_of = [f.name for f in fields(Traced) if f.name not in ("graph", "reads")]
    changed = [name for name in fields_of if getattr(first, name) != getattr(second, name)]
    sources = [[node.source for node in traced.graph.nodes] for traced in (first, second)]
    pairs = {"graph": first.graph == second.graph, "sources": sources[0] == sources[1]}
    pairs |= {"constants": _equal(first.graph.constants, second.graph.constants)}
    pairs |= {"reads": same_guards(first.reads, second.reads)}
    return [*changed, *(name for name, is_same in pairs.items() if not is_same)]


def _equal(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    def same(left: torch.Tensor, right: torch.Tensor) -> bool:
        return left is right or (left.dtype == right.dtype and torch.equal(left.cpu(), right.cpu()))

    return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
