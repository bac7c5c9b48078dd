"""``loss.backward()`` of a call in microbatches.

Forward and backward of microbatches take turns, so both run when the model is called, with a gradient of one for the
loss. What ``backward()`` brings then is a factor of every gradient: they are linear in the gradient of the loss, which
is one number. So ``(loss / n).backward()`` and ``(loss * weight + other).backward()`` are those of one device. Only
the model's own loss can be differentiated so.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.runtime.torch_internals.profiling import span

from .autograd import Check
from .pipeline_call import PipelineCall, Stepped

_ONLY_THE_LOSS = (
    "under a plan with microbatches, forward and backward of several microbatches take turns, so only the loss that "
    "the model returns can be differentiated"
)


class _SteppedFunction(torch.autograd.Function):
    """Runs a :class:`PipelineCall` in autograd. Inputs: the call, its leaves, the check of gradients, and a tensor that
    requires a gradient. Outputs: the tensors of ``call.results``."""

    @staticmethod
    def forward(ctx: Any, call: PipelineCall, leaves: Sequence[Any], check: Check | None, _: torch.Tensor) -> Any:
        ctx.call, ctx.leaves, ctx.check = call, leaves, check
        ctx.stepped = call.differentiate(leaves)
        ctx.set_materialize_grads(False)
        return tuple(ctx.stepped.outputs[name].detach() for name in call.results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call: PipelineCall = ctx.call
        if torch.is_grad_enabled():
            raise AutoparError("a compiled model has no second derivatives: call backward() without create_graph=True")
        if ctx.stepped is None:
            raise AutoparError(
                "the gradients of this call are gone after the first backward(), with retain_graph=True as well: add "
                "the losses and call backward() once, or run the model again"
            )
        arrived = {n: g for n, g in zip(call.results, gradients, strict=True) if g is not None}
        _check_only_loss(call, arrived)
        stepped, ctx.stepped = ctx.stepped, None
        with span("backward()"), nullcontext() if call.watch is None else call.watch.call("backward()"):
            for gradient in arrived.values():
                _add(call, stepped.times(gradient), ctx.check, gradient, ctx.leaves)
        return None, None, None, None


def _check_only_loss(call: PipelineCall, arrived: dict[str, torch.Tensor]) -> None:
    others = [call.output_name(name) for name in arrived if name != call.signature.loss]
    if others:
        loss = call.output_name(call.loss_name())
        raise AutoparError(
            f"a gradient arrived at output {', '.join(others)}: {_ONLY_THE_LOSS}, {loss}. Compute your own loss in a "
            "loss_fn (parallelize(..., loss_fn=...) and model.step), or plan with Options(stages=1, microbatches=1)"
        )


def _add(
    call: PipelineCall, stepped: Stepped, check: Check | None, tangent: torch.Tensor, leaves: Sequence[Any]
) -> None:
    if check is not None:

        def again() -> None:
            call.differentiate(leaves, stepped.state)

        kept = check({("gradient", path): value for path, value in stepped.gradients.items()}, [tangent], again)
        if not kept and stepped.gradients:
            return
    call.add(stepped)


def differentiate_stepped(
    call: PipelineCall, leaves: Sequence[Any], check: Check | None = None
) -> dict[str, torch.Tensor]:
    """Runs ``call`` with a backward; returns whole outputs by name, of which the loss can be differentiated. ``check``:
    looks at gradients. Raises :class:`AutoparError` if the model returns no loss, or an input requires a gradient."""
    if call.signature.loss is None or not call.program.schedule.training:
        raise AutoparError(
            f"{_ONLY_THE_LOSS}, but it returns none for this batch: pass the labels from which it computes one, run "
            "loss = model.step(...) with a loss_fn, or model(...) under torch.no_grad() to evaluate"
        )
    named = zip(call.signature.input_names, leaves, strict=True)
    wanted = [name for name, leaf in named if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if wanted:
        raise AutoparError(
            f"the input {wanted[0]} requires a gradient, but a program in microbatches computes none for inputs: pass "
            f"{wanted[0]}.detach()"
        )
    anchor = torch.zeros((), requires_grad=True)
    outputs = _SteppedFunction.apply(call, leaves, check, anchor)
    return dict(zip(call.results, outputs, strict=True))
