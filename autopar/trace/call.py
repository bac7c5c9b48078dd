"""The arguments and the results of a traced call, as flat lists of leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal

import torch

from autopar.errors import OptionsError, TraceError
from autopar.torch_internals.fake_tensors import expression_of
from autopar.torch_internals.trees import (
    ResidentKey,
    TreeSpec,
    register_dataclass,
    tree_flatten_with_path,
    tree_unflatten,
)
from autopar.trace.guards.values import CONSTANT_TYPES

Differentiate = Literal["loss", "all"]


@dataclass(frozen=True)
class Call:
    """``model(*args, **kwargs)`` as leaves of a pytree. ``names[i]`` is None where leaf i is not a tensor;
    ``batch`` is the size of dim 0 that most tensor leaves share (0: there is none, or it is below 2). ``resident``: the
    names of the tensors that stay on the devices between calls (:class:`ResidentKey`)."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    names: tuple[str | None, ...]
    batch: int
    resident: frozenset[str] = frozenset()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensor leaves by name, in order."""
        return {name: leaf for name, leaf in zip(self.names, self.leaves, strict=True) if name is not None}

    @property
    def constants(self) -> dict[int, Any]:
        """The leaves that are not tensors, by position."""
        return {i: leaf for i, leaf in enumerate(self.leaves) if self.names[i] is None}

    def rebuild(self, tensors: Iterable[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` with ``tensors`` instead of the tensor leaves."""
        source = iter(tensors)
        leaves = [leaf if name is None else next(source) for name, leaf in zip(self.names, self.leaves, strict=True)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


def check_rows(call: Call) -> None:
    """Raises :class:`OptionsError` for a batch all of whose tensors are empty."""
    tensors = call.tensors
    if tensors and not any(tensor.numel() for tensor in tensors.values()):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in list(tensors.items())[:3])
        raise OptionsError(f"the batch is empty: {shapes}; give at least one row, or leave out such a batch")


def describe_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Flattens the inputs. Raises :class:`TraceError` for a leaf that is neither a tensor nor a plain
    constant.
    """
    paths, spec = tree_flatten_with_path((args, dict(kwargs)))
    names = tuple(_leaf_name(path) if isinstance(leaf, torch.Tensor) else None for path, leaf in paths)
    for path, leaf in paths:
        if not isinstance(leaf, (torch.Tensor, *CONSTANT_TYPES)):
            raise TraceError(_bad_input(_leaf_name(path), leaf))
    leaves = tuple(leaf for _, leaf in paths)
    resident = frozenset(_leaf_name(path) for path, _ in paths if isinstance(path[-1], ResidentKey))
    batch = _batch_size(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return Call(spec, leaves, names, batch, resident)


def _leaf_name(path: tuple[Any, ...]) -> str:
    """``labels.1`` for ``kwargs["labels"][1]``; positional inputs are named by position."""
    return _path_name(path[1:])


def _path_name(path: tuple[Any, ...]) -> str:
    keys = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path]
    return ".".join(map(str, keys))


def _bad_input(name: str, leaf: Any) -> str:
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    advice = (
        "pass torch.from_numpy(...) instead" if kind.startswith("numpy.") else "pass tensors, or build it in forward"
    )
    return (
        f"input {name!r} is a {kind}, which a graph cannot take: inputs are tensors (traced) and None, "
        f"numbers, strings and the like (fixed by the trace), in tuples, lists and dicts; {advice}"
    )


def _batch_size(tensors: Iterable[torch.Tensor]) -> int:
    sizes = Counter(int(tensor.shape[0]) for tensor in tensors if tensor.dim() > 0)
    common = [(count, -order, size) for order, (size, count) in enumerate(sizes.items()) if size >= 2]
    return max(common)[2] if common else 0


@dataclass
class Returned:
    """What the traced call returned, recorded during the trace: the tree, and for each leaf its graph output or its
    constant. ``lost`` names the leaves that are neither, with their types.
    """

    spec: TreeSpec | None = None
    names: tuple[str | None, ...] = ()
    constants: dict[int, Any] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    loss: str | None = None
    differentiable: tuple[str, ...] = ()
    order: tuple[str, ...] = ()


def collect_outputs(
    output: Any, loss: torch.Tensor | None, differentiate: Differentiate, returned: Returned
) -> tuple[torch.Tensor, ...]:
    """The graph outputs of one call, in the order of ``returned.order``; fills in ``returned``.

    ``loss`` is what a loss function computed from ``output``. An output leaf that is neither tensor nor constant (a
    key-value cache object) becomes None, and ``returned.lost`` names it. Every result is a copy, so that no two alias
    each other or an input; outputs that are not differentiated are detached.
    """
    paths, returned.spec = _flatten_output(output)
    leaves = [leaf for _, leaf in paths]
    named = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    returned.names = tuple(str(i) if str(i) in named else None for i in range(len(leaves)))
    returned.constants = {i: _constant(leaf) for i, leaf in enumerate(leaves) if str(i) not in named}
    returned.lost = {_path_name(path) or "output": type(leaf).__name__ for path, leaf in paths if _is_lost(leaf)}
    if loss is not None:
        named["loss"] = loss
    returned.loss = "loss" if loss is not None else _find_loss(output, named)
    differentiated = named if differentiate == "all" or returned.loss is None else {returned.loss}
    returned.differentiable = tuple(
        name for name in named if name in differentiated and _is_differentiable(named[name])
    )
    returned.order = tuple(named)
    return tuple(
        leaf.clone() if name in returned.differentiable else leaf.detach().clone() for name, leaf in named.items()
    )


def _flatten_output(output: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], TreeSpec]:
    """Flattens ``output`` into leaves with their paths, and its tree. Registers dataclasses that are new, as trees of
    their fields.
    """
    leaves, spec = tree_flatten_with_path(output)
    fresh = {type(leaf) for _, leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, type)}
    if not fresh:
        return leaves, spec
    for kind in sorted(fresh, key=lambda kind: kind.__qualname__):
        register_dataclass(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")
    return _flatten_output(output)


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _is_lost(leaf: Any) -> bool:
    return not isinstance(leaf, (torch.Tensor, *CONSTANT_TYPES, *_SYMBOLIC))


def _constant(leaf: Any) -> Any:
    if isinstance(leaf, _SYMBOLIC):
        return expression_of(leaf)
    return leaf if isinstance(leaf, CONSTANT_TYPES) else None


def _find_loss(output: Any, named: Mapping[str, torch.Tensor]) -> str | None:
    """The name of the output called ``loss``, or of the only differentiable scalar."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    for name, leaf in named.items():
        if leaf is loss and leaf.numel() == 1:
            return name
    scalars = [name for name, leaf in named.items() if leaf.dim() == 0 and _is_differentiable(leaf)]
    return scalars[0] if len(scalars) == 1 else None


def _is_differentiable(leaf: torch.Tensor) -> bool:
    return leaf.requires_grad and (leaf.is_floating_point() or leaf.is_complex())
