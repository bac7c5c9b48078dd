"""Replaces mixture-of-experts blocks of transformers by one operation while a model is traced.

By default, or if configured so, these blocks loop over the experts that some token chose, which no graph can express;
other implementations sort the tokens, or copy an expert's matrices for every token. While a model is traced they run
:func:`autopar.ops.experts.experts` instead, which computes the same and can be sharded by experts. The model's
configuration is not changed.

Blocks are recognised by the interface through which they choose their implementation, never by name. A block that the
operation cannot express (a norm behind each expert, an activation with parameters) runs the sorted form,
``grouped_mm``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard
from unittest.mock import patch

import torch
from torch import Tensor, nn

from autopar.ops.activation import Activation
from autopar.ops.experts import experts
from autopar.torch_internals.hugging_face import gate_of, is_expert_parallel
from autopar.torch_internals.joint_graphs import make_fx
from autopar.torch_internals.operators import OpOverload

from .alike_modules import are_alike, members_of

_MODULE = "transformers.integrations.moe"
# Numbers of rows. The one that does not divide the width is used: where it appears in a graph, it is the number of
# rows. (A number that equals it by chance fails the comparison with another number of rows.)
# Chosen: small primes.
_ROWS = (11, 13)


@contextmanager
def experts_as_operations(model: nn.Module, autocast: torch.dtype | None = None) -> Iterator[None]:
    """Makes the blocks of ``model`` traceable; does nothing if transformers is not imported. ``autocast``: the dtype to
    which products, including those of experts, are cast where autocast is enabled."""
    moe = sys.modules.get(_MODULE)
    if moe is None:
        yield
        return
    dtypes = (None,) if autocast is None else (None, autocast)
    known: list[_Known] = []
    every = ((module, dtype, _activation(module, dtype, known)) for module in model.modules() for dtype in dtypes)
    texts = {(id(module), dtype): text for module, dtype, text in every if text is not None}

    def get_interface(_interface: Any, _name: str, _default: Callable[..., Any]) -> Callable[..., Any]:
        def forward(module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            dtype = autocast if torch.is_autocast_enabled(x.device.type) else None
            activation = texts.get((id(module), dtype))
            if activation is None:
                return moe.grouped_mm_experts_forward(module, x, ids, weights)  # type: ignore[no-any-return]
            return _run(module, x, ids, weights, activation, dtype)

        return forward

    with patch.object(moe.ExpertsInterface, "get_interface", get_interface):
        yield


@contextmanager
def recorded_choices() -> Iterator[dict[nn.Module, list[Tensor]]]:
    """The experts that tokens choose while a model runs: for each block the ids [T, k] of each call."""
    moe, found = sys.modules.get(_MODULE), dict[nn.Module, list[Tensor]]()
    if moe is None:
        yield found
        return
    original = moe.ExpertsInterface.get_interface

    def get_interface(interface: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        run = original(interface, name, default)

        def forward(module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Any:
            found.setdefault(module, []).append(ids.detach())
            return run(module, x, ids, weights)

        return forward

    with patch.object(moe.ExpertsInterface, "get_interface", get_interface):
        yield found


def _run(module: Any, x: Tensor, ids: Tensor, weights: Tensor, text: str, autocast: torch.dtype | None) -> Tensor:
    """Computes what ``module`` does; in the dtype ``autocast``, if that is not None, like its products."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    names = (name, "down_proj", *((f"{name}_bias", "down_proj_bias") if module.has_bias else ()))
    dtype = autocast or getattr(module, name).dtype
    # Cast before any other operation, so that the casts are those of parameters.
    up, down, *biases = (getattr(module, each).to(dtype) for each in names)
    up_bias, down_bias = biases or (None, None)
    if module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    # Under autocast the tokens may have another dtype than the matrices.
    out: Tensor = experts(x.to(dtype), ids, weights, up, down, up_bias, down_bias, text, int(up.shape[0]), 0)
    return out.to(x.dtype)


@dataclass(frozen=True)
class _Known:
    """The ``text`` of a block, in ``dtype`` on rows of so many columns; None if it has none."""

    module: nn.Module
    width: int
    dtype: torch.dtype
    text: str | None


def _activation(module: Any, dtype: torch.dtype | None, known: list[_Known]) -> str | None:
    """The text of what ``module`` computes between its two matrices, in ``dtype`` or that of the matrices; None if it
    is not such a block, or if the operation cannot express it. ``known``: those of other blocks, to which it is added:
    to find one takes half a second, and the blocks of a model are mostly alike."""
    has_all = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "down_proj"))
    if not has_all or getattr(module, "has_post_expert_norm", False) or is_expert_parallel(module):
        return None
    up = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
    if not (_is_stacked(up) and _is_stacked(module.down_proj)):
        return None
    width = int(up.shape[2 if module.is_transposed else 1])
    dtype, is_plain = dtype or up.dtype, _has_matrices_alone(module)
    for other in known if is_plain else ():
        if (other.width, other.dtype) == (width, dtype) and are_alike(other.module, module):
            return other.text
    function = gate_of(module) if module.has_gate else module.act_fn
    text = activation_text(function, width, dtype)
    if is_plain:
        known.append(_Known(module, width, dtype, text))
    return text


def _has_matrices_alone(module: nn.Module) -> bool:
    """Whether a block has no tensors whose values an activation might read."""
    named = (name for each in (module.named_parameters(), module.named_buffers()) for name, _ in each)
    plain = any(isinstance(value, Tensor) for part in module.modules() for value in members_of(part).values())
    return {name.removesuffix("_bias") for name in named} <= {"gate_up_proj", "up_proj", "down_proj"} and not plain


def _is_stacked(matrix: object) -> TypeGuard[Tensor]:
    return isinstance(matrix, Tensor) and matrix.dim() == 3


def activation_text(function: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> str | None:
    """``function`` of a tensor [n, width] in the text form of :class:`autopar.ops.activation.Activation`; None unless
    it is a fixed list of operations, the same for every n, that computes each row by itself."""
    generator = torch.Generator().manual_seed(0)
    rows = _ROWS[0] if width % _ROWS[0] else _ROWS[1]
    samples = [torch.randn(count, width, generator=generator).to(dtype) for count in (rows, 3)]

    def result(x: Tensor) -> Tensor:  # make_fx looks at signatures, and bound methods and defaults confuse it.
        return function(x)

    def gradient(x: Tensor, grad: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(result(leaf), leaf, grad)[0]

    try:
        with torch.no_grad():
            first = samples[0], torch.ones_like(result(samples[0]))
            graphs = make_fx(result)(samples[0]).graph, make_fx(gradient)(*first).graph
            text = json.dumps([_steps(graph, rows) for graph in graphs])
            same = all(_agrees(Activation.parse(text), result, gradient, x) for x in samples)
    except Exception:  # A function without a text form uses the other implementation.
        return None
    return text if same else None


def _agrees(
    activation: Activation,
    function: Callable[[Tensor], Tensor],
    gradient: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
) -> bool:
    """Whether both compute the same, and every row of the result depends on that row of ``x`` only."""
    result = function(x)
    grad = result.cos()
    same = torch.equal(activation(x), result) and torch.equal(activation.gradient(x, grad), gradient(x, grad))
    rowwise = result.shape[0] == x.shape[0] and torch.allclose(function(x[-1:]), result[-1:])
    return same and rowwise


def _steps(graph: torch.fx.Graph, rows: int) -> list[Any]:
    positions: dict[torch.fx.Node, dict[str, Any]] = {}
    steps: list[Any] = []
    operands = len(graph.find_nodes(op="placeholder"))

    def leaf(arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return positions[arg]
        if isinstance(arg, (list, tuple)):
            return [leaf(item) for item in arg]
        if isinstance(arg, int) and arg == rows:
            return {"rows": True}
        if isinstance(arg, torch.device):
            return {"device": True}
        return {"dtype": str(arg).removeprefix("torch.")} if isinstance(arg, torch.dtype) else arg

    for node in graph.nodes:
        if node.op == "placeholder":
            positions[node] = {"value": len(positions)}
        elif node.op == "call_function" and isinstance(node.target, OpOverload):
            name = str(node.target)
            kwargs = {key: leaf(arg) for key, arg in node.kwargs.items() if arg not in (torch.strided, None)}
            steps.append([name, leaf(node.args), kwargs])
            positions[node] = {"value": operands + len(steps) - 1}
        elif node.op == "call_function":
            source, item = node.args
            positions[node] = {**positions[source], "item": item}
        elif node.op == "output" and positions[node.args[0]] != {"value": operands + len(steps) - 1}:
            raise ValueError("the last operation does not compute the result")
        elif node.op == "get_attr":
            raise ValueError("the activation has parameters")
    return steps
