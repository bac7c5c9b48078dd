"""Ties a compiled call into autograd, so that ``loss.backward()`` works as always."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime.state.gradient_hooks import prepare_hooks
from autopar.runtime.state.parameters import gather_whole
from autopar.runtime.state.weights import gradient_like

from .call import Call, Past

OtherCall = Callable[[], Call]


class _Tie(torch.autograd.Function):
    """Inputs: a :class:`Call`, its leaves, then the parameters and those leaves that want a gradient.
    Outputs: the tensors of ``call.results``, as presented."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, leaves: Sequence[Any], wanted: list[str], other: OtherCall, *tensors: torch.Tensor
    ) -> Any:
        ctx.past = Past()
        outputs, ctx.saved = call.run(leaves, ctx.past)
        ctx.call, ctx.wanted, ctx.leaves, ctx.other = call, wanted, leaves, other
        ctx.inputs = list(tensors[len(call.parameters) :])
        ctx.dtypes = {name: value.dtype for name, value in outputs.items()}
        ctx.set_materialize_grads(False)
        return tuple(call.present(name, outputs[name]) for name in call.results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call: Call = ctx.call
        if torch.is_grad_enabled():
            raise AutoparError("a compiled model has no second derivatives: call backward() without create_graph=True")
        if ctx.saved is None:
            raise AutoparError(
                "the values saved for backward are gone after the first backward(), with "
                "retain_graph=True as well: add the losses "
                "and call backward() once, or run the model again"
            )
        arrived = dict(zip(call.results, gradients, strict=True))
        saved, ctx.saved = ctx.saved, None
        if not call.differentiates(name for name, gradient in arrived.items() if gradient is not None):
            # A loss of the user's own, of outputs beside the model's loss: the forward is run again, once, by a program
            # that differentiates them, as later calls are from the beginning.
            call = ctx.other()
            saved = call.saved_again(ctx.leaves, ctx.past)
        found = call.backward(saved, call.tangents(arrived, ctx.dtypes))
        return (None, None, None, None, *_parameter_gradients(ctx.call, found), *_input_gradients(ctx, call, found))


def _parameter_gradients(call: Call, found: dict[tuple[str, str], torch.Tensor]) -> list[torch.Tensor | None]:
    pairs = zip(call.program.parameters, call.parameters, strict=True)
    local = [(parameter, found.pop(("gradient", slot.target), None)) for slot, parameter in pairs]
    for parameter, gradient in local:
        prepare_hooks(parameter, gradient is not None)
    return [gradient if gradient is None else gradient_like(parameter, gradient) for parameter, gradient in local]


def _input_gradients(ctx: Any, call: Call, found: dict[tuple[str, str], torch.Tensor]) -> list[torch.Tensor | None]:
    results: list[torch.Tensor | None] = []
    for name, given in zip(ctx.wanted, ctx.inputs, strict=True):
        local = found.get(("input_gradient", name))
        if local is None:
            results.append(None)
            continue
        whole = gather_whole(local, call.input_gradients[name], call.groups)
        if isinstance(given, DTensor):
            whole = DTensor.from_local(whole, given.device_mesh, run_check=False).redistribute(
                placements=given.placements
            )
        results.append(whole)
    return results


def differentiate(
    call: Call, leaves: Sequence[Any], other: OtherCall, name_of: Callable[[object], str]
) -> dict[str, torch.Tensor]:
    """Runs ``call`` with a backward: presented outputs by name. Gradients of outputs that ``call`` does not
    differentiate are those of the ``other`` program. ``name_of`` says what the author of the call calls a leaf. Raises
    :class:`AutoparError` if an input wants a gradient that the program does not compute."""
    names = call.signature.input_names
    wanted = [
        (name, leaf)
        for name, leaf in zip(names, leaves, strict=True)
        if name is not None and isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    missing = [name_of(leaf) for name, leaf in wanted if name not in call.input_gradients]
    if missing:
        raise AutoparError(
            f"the input {missing[0]} requires a gradient, but the program computes none for it: pass "
            f"{missing[0]}.detach()"
        )
    inputs = [leaf for _, leaf in wanted]
    outputs = _Tie.apply(call, leaves, [name for name, _ in wanted], other, *call.parameters, *inputs)
    return dict(zip(call.results, outputs, strict=True))
