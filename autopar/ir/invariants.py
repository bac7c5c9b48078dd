"""The invariants of a graph (:mod:`.graph` lists them), checked node by node in one walk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.errors import GraphError

from .node import SAVED_ACTIVATION, Node, Output, TensorType, Value

# By the kind of an output, the operation of the placeholder that has the output's name and must have its type.
_OWNERS = {"gradient": "param", "input_gradient": "input", "mutation": "buffer"}
# Caches are changed as buffers are.
_OWNED = {"cache": "buffer"}


def check_nodes(nodes: Iterable[Node]) -> dict[str, Node]:
    """The ``nodes`` by name. Raises :class:`GraphError` naming the first that breaks an invariant."""
    defined: dict[str, Node] = {}
    for node in nodes:
        for value in node.operands:
            source = defined.get(value.node)
            if source is None:
                raise GraphError(f"%{node.name} = {node.op} uses {value} before its definition")
            kinds = source.types
            known = value.index < len(kinds) and kinds[value.index] is not None and node.op != SAVED_ACTIVATION
            if not known or (node.phase == "forward" and source.phase == "backward"):
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
        raise GraphError(f"%{node.name} uses {value}, but that result of {source.op} is not a tensor")
    if node.phase == "forward" and source.phase == "backward" and not source.is_placeholder:
        raise GraphError(f"%{node.name} = {node.op} is of the forward phase and uses {value} of the backward phase")
    if node.op == SAVED_ACTIVATION and node.types != (kind,):
        raise GraphError(f"%{node.name} saves an activation of type {node.types[0]}, but {value} is {kind}")


def check_outputs(outputs: Iterable[Output], defined: Mapping[str, Node]) -> None:
    """Raises :class:`GraphError` naming the first of ``outputs`` that no node computes, or whose type differs from that
    of the parameter, input or buffer it belongs to."""
    owners = {(_OWNED.get(node.op, node.op), node.target): node for node in defined.values() if node.is_placeholder}
    for output in outputs:
        if output.value is None:
            continue
        actual = _type_of(output, output.value, defined)
        owner = owners.get((_OWNERS.get(output.kind, ""), output.name))
        if owner is not None and not _agree(actual, owner.stored, exactly=output.kind == "mutation"):
            raise GraphError(
                f"the {output.kind} {output.name!r} is {output.value}: {actual}, but %{owner.name} is {owner.stored}"
            )


def _type_of(output: Output, value: Value, defined: Mapping[str, Node]) -> TensorType:
    if value.node not in defined:
        raise GraphError(f"the {output.kind} {output.name!r} is {value}, which is not defined")
    types = defined[value.node].types
    tensor_type = types[value.index] if value.index < len(types) else None
    if tensor_type is None:
        raise GraphError(f"the {output.kind} {output.name!r} is {value}, which is not a tensor")
    return tensor_type


def _agree(actual: TensorType, expected: TensorType, exactly: bool) -> bool:
    """Whether dtype and shape agree. Symbolic sizes pass, since equal expressions may look different. Unless
    ``exactly``, any floating dtype will do: a gradient may be reduced in 16 bits, and is cast when it is stored."""
    sizes = zip(actual.shape, expected.shape, strict=False)
    unequal = any(a != b and isinstance(a, int) and isinstance(b, int) for a, b in sizes)
    floating = not exactly and actual.dtype.is_floating_point and expected.dtype.is_floating_point
    return (floating or actual.dtype == expected.dtype) and actual.rank == expected.rank and not unequal
