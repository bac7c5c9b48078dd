"""Ties a compiled call into autograd, so that ``loss.backward()`` works as always."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime.state.gradient_hooks import has_hooks, prepare_hooks
from autopar.runtime.state.parameters import gather_whole
from autopar.runtime.state.weights import add_gradient, gradient_like
from autopar.runtime.torch_internals.accumulation import accumulating
from autopar.runtime.torch_internals.profiling import span

from .call import Call, Past

OtherCall = Callable[[], Call]
# Given local gradients, what backward began with, and what repeats both: the gradients to use.
Check = Callable[[dict[tuple[str, str], torch.Tensor], Sequence[torch.Tensor], Callable[[], object]], Any]


class _CompiledFunction(torch.autograd.Function):
    """Runs a :class:`Call` in autograd. Inputs: the call, its leaves, then the parameters and the leaves that require a
    gradient. Outputs: the tensors of ``call.results``, as presented to the user."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        leaves: Sequence[Any],
        wanted: list[str],
        other: OtherCall,
        check: Check | None,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.past = Past()
        outputs, ctx.saved = call.run(leaves, ctx.past)
        ctx.call, ctx.wanted, ctx.leaves, ctx.other, ctx.check = call, wanted, leaves, other, check
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
        with span("backward()"), nullcontext() if call.watch is None else call.watch.call("backward()"):
            return _CompiledFunction._differentiate(ctx, call, gradients)

    @staticmethod
    def _differentiate(ctx: Any, call: Call, gradients: Sequence[torch.Tensor | None]) -> Any:
        arrived = dict(zip(call.results, gradients, strict=True))
        saved, ctx.saved = ctx.saved, None
        if not call.differentiates(name for name, gradient in arrived.items() if gradient is not None):
            # A loss of the user's own, computed from other outputs than the model's loss: a program that differentiates
            # these runs forward once more. Later calls use that program from the beginning.
            call = ctx.other()
            saved = call.saved_again(ctx.leaves, ctx.past)
        tangents = call.tangents(arrived, ctx.dtypes)
        local = call.backward(saved, tangents)
        if ctx.check is not None:

            def again() -> None:
                call.backward(call.saved_again(ctx.leaves, ctx.past), tangents)

            local = ctx.check(local, tangents, again)
        of_parameters, of_inputs = _parameter_gradients(ctx, local), _input_gradients(ctx, call, local)
        return (None, None, None, None, None, *of_parameters, *of_inputs)


def _parameter_gradients(ctx: Any, local: dict[tuple[str, str], torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of parameters for autograd. Those that it would only add to ``.grad`` are added here, and are None
    in the list, since it takes ten microseconds for each DTensor. A hook on the node of autograd that accumulates such
    a gradient still runs after that, and gets None."""
    call: Call = ctx.call
    gradients = [local.pop(("gradient", slot.target), None) for slot in call.program.parameters]
    nodes = [node for node, _ in ctx.next_functions[: len(gradients)]]
    adds = accumulating(nodes)
    for index, (parameter, gradient) in enumerate(zip(call.parameters, gradients, strict=True)):
        hooked = has_hooks(parameter)
        if hooked:
            prepare_hooks(parameter, gradient is not None)
        if gradient is not None:
            is_added = adds[index] and not hooked and add_gradient(parameter, gradient)
            gradients[index] = None if is_added else gradient_like(parameter, gradient)
    return gradients


def _input_gradients(ctx: Any, call: Call, local: dict[tuple[str, str], torch.Tensor]) -> list[torch.Tensor | None]:
    results: list[torch.Tensor | None] = []
    for name, tensor in zip(ctx.wanted, ctx.inputs, strict=True):
        part = local.get(("input_gradient", name))
        if part is None:
            results.append(None)
            continue
        gradient = gather_whole(part, call.input_gradients[name], call.groups)
        if isinstance(tensor, DTensor):
            gradient = DTensor.from_local(gradient, tensor.device_mesh, run_check=False).redistribute(
                placements=tensor.placements
            )
        results.append(gradient)
    return results


def differentiate(
    call: Call,
    leaves: Sequence[Any],
    other: OtherCall,
    name_of: Callable[[object], str],
    check: Check | None = None,
) -> dict[str, torch.Tensor]:
    """Runs ``call`` with a backward; returns presented outputs by name. The ``other`` program computes gradients of
    outputs that ``call`` does not differentiate. ``name_of``: the user's name of a leaf; ``check``: looks at gradients.
    Raises :class:`AutoparError` if an input requires a gradient that the program does not compute."""
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
    tensors = (*call.parameters, *(leaf for _, leaf in wanted))
    outputs = _CompiledFunction.apply(call, leaves, [name for name, _ in wanted], other, check, *tensors)
    return dict(zip(call.results, outputs, strict=True))
