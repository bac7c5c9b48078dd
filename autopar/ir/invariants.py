"""The invariants of a graph (:mod:`.graph` lists them), checked node by node in one walk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.errors import GraphError

from .node import SAVED_ACTIVATION, Node, Output, TensorType, Value

# What an output of a kind has the type of: the placeholders of an operation, found by the output's name.
_OWNERS = {"gradient": "param", "input_gradient": "input", "mutation": "buffer"}


def check_nodes(nodes: Iterable[Node]) -> dict[str, Node]:
    """The ``nodes`` by name. Raises :class:`GraphError` naming the first that breaks an invariant."""
    defined: dict[str, Node] = {}
    for node in nodes:
        for value in node.operands:
            source = defined.get(value.node)
            if source is None:
                raise GraphError(f"%{node.name} = {node.op} uses {value} before its definition")
            _check_use(node, value, source)
        if node.name in defined:
            raise GraphError(f"%{node.name} is defined twice")
        defined[node.name] = node
    return defined


def _check_use(node: Node, value: Value, source: Node) -> None:
    if value.index >= len(source.types):
        raise GraphError(f"%{node.name} uses {value}, but {source.op} has no such result")
    kind = source.types[value.index]
    if kind is None:
        raise GraphError(f"%{node.name} uses {value}, but that result of {source.op} is no tensor")
    if node.phase == "forward" and source.phase == "backward" and not source.is_placeholder:
        raise GraphError(f"%{node.name} = {node.op} is of the forward phase and uses {value} of the backward phase")
    if node.op == SAVED_ACTIVATION and node.types != (kind,):
        raise GraphError(f"%{node.name} is a rest of type {node.types[0]}, but of {value}: {kind}")


def check_outputs(outputs: Iterable[Output], defined: Mapping[str, Node]) -> None:
    """Raises :class:`GraphError` naming the first of ``outputs`` that no node gives, or that has not the type of what
    it belongs to."""
    owners = {(node.op, node.target): node for node in defined.values() if node.is_placeholder}
    for output in outputs:
        if output.value is None:
            continue
        found = _type_of(output, output.value, defined)
        owner = owners.get((_OWNERS.get(output.kind, ""), output.name))
        if owner is not None and not _agree(found, owner.stored, exactly=output.kind == "mutation"):
            raise GraphError(
                f"the {output.kind} {output.name!r} is {output.value}: {found}, but %{owner.name} is {owner.stored}"
            )


def _type_of(output: Output, value: Value, defined: Mapping[str, Node]) -> TensorType:
    if value.node not in defined:
        raise GraphError(f"the {output.kind} {output.name!r} is {value}, which is not defined")
    types = defined[value.node].types
    found = types[value.index] if value.index < len(types) else None
    if found is None:
        raise GraphError(f"the {output.kind} {output.name!r} is {value}, which is no tensor")
    return found


def _agree(found: TensorType, wanted: TensorType, exactly: bool) -> bool:
    """Whether both have the same dtype and shape; two expressions of a size may be equal and look different. Unless
    ``exactly``, another floating dtype will do: a gradient may be reduced in 16 bits, and is cast when it is kept."""
    sizes = zip(found.shape, wanted.shape, strict=False)
    unequal = any(a != b and isinstance(a, int) and isinstance(b, int) for a, b in sizes)
    floating = not exactly and found.dtype.is_floating_point and wanted.dtype.is_floating_point
    return (floating or found.dtype == wanted.dtype) and found.rank == wanted.rank and not unequal
