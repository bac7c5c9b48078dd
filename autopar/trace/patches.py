"""Replaces parts of torch that a graph cannot express while a model is traced.

- ``checkpoint`` recomputes in backward, or runs autograd inside autograd; the plan chooses which values to retain, so
  its function is simply called;
- dropout, in attention too, keeps whole floating-point masks on some devices and draws by a kernel of its own on
  others; here it is ``native_dropout`` everywhere, and attention with dropout is written out;
- ``Module.to`` inside a forward replaces the data of parameters; here it is an operation with a gradient;
- batch norm with a cumulative average (``momentum=None``) reads its counter as a Python number; here it stays a tensor;
- ``SyncBatchNorm`` communicates by itself; a graph has the statistics of the whole batch anyway, so it is batch norm;
- embeddings with sparse gradients get dense ones of the same values, which collectives and optimizers can take;
- ``embedding_bag`` looks up and reduces in one kernel that no rule can divide (:mod:`.embedding_bags`);
- ``flex_attention`` is a loop that a compiler builds from Python functions; its definition, with all scores, is a graph
  like any other, and has a gradient everywhere;
- Hugging Face builds causal masks that eager attention leaves to the kernel, so that an exported graph holds for other
  lengths; autopar traces each length separately, and does what eager does;
- recurrent layers in single precision run on the CPU as one operation of oneDNN, whose backward takes arguments that no
  graph can express (absent tensors, a workspace); here they are steps of products, as in double precision;
- ``nn.Transformer`` compares a mask with the causal one to let attention leave it out; here the mask is used as it is.
  In evaluation its encoder uses nested tensors and fused layers; here it runs the layers that it trains with;
- ``cov`` and ``corrcoef`` warn if a value is too small; here they do not (:mod:`.covariance`);
- devices: a model is traced on the CPU, so where it names the device it is written for, the CPU is meant;
- ``bincount`` with a least length gives so many counts: a larger value is an error, not a longer result, whose shape no
  graph would know;
- ``len(tensor)`` must be a plain number, which would fix the batch size; here it is the size of dim 0, symbolic or not;
- checks of linear algebra (``cholesky`` of a matrix that has none), of distributions and of the variance in a Gaussian
  loss raise depending on values; a graph cannot raise.

Besides, equal operations on symbolic sizes are computed once (:mod:`autopar.torch_internals.size_arithmetic`).
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode

from autopar.torch_internals import replacements
from autopar.torch_internals.hugging_face import masks_as_in_eager
from autopar.torch_internals.modules import BatchNorm, buffers_of, check_batch_norm_input, parameters_of
from autopar.torch_internals.operators import safe_softmax
from autopar.torch_internals.size_arithmetic import remembered_arithmetic
from autopar.trace.decompositions.corrected import corrected

from .covariance import CORRELATIONS, COVARIANCES, correlation, covariance
from .embedding_bags import embedding_bag
from .named_devices import OnProcessor, autocast_on_processor

_CHECKS = "aten::_linalg_check_errors"
_plain_length = len
_batch_norm_forward = BatchNorm.forward


@contextmanager
def patched(device: str = "cpu") -> Iterator[None]:
    """Makes the parts of torch named above traceable, for a model that is written for this type of device."""
    with ExitStack() as stack:
        stack.enter_context(remembered_arithmetic())
        stack.enter_context(replacements.checkpoint_replaced(_call, _around_a_call))
        stack.enter_context(replacements.module_conversion_replaced(_convert))
        stack.enter_context(patch.object(BatchNorm, "forward", _batch_norm))
        stack.enter_context(patch.object(nn.SyncBatchNorm, "forward", _batch_norm))
        stack.enter_context(patch.object(F, "embedding_bag", embedding_bag))
        stack.enter_context(replacements.without_effect(_CHECKS))
        stack.enter_context(replacements.without_mkldnn())
        stack.enter_context(_without_fast_path())
        stack.enter_context(replacements.causal_mask_detection_replaced(_declared_causal))
        stack.enter_context(corrected())
        stack.enter_context(replacements.without_distribution_checks())
        stack.enter_context(replacements.flex_attention_by_definition())
        stack.enter_context(masks_as_in_eager())
        stack.enter_context(patch.object(builtins, "len", _length))
        stack.enter_context(_TraceableFunctions())
        if device != "cpu":
            stack.enter_context(replacements.functional_move_replaced(device, _stays))
            stack.enter_context(autocast_on_processor(device))
            stack.enter_context(torch.device("cpu"))  # Whatever `torch.set_default_device` said.
            stack.enter_context(OnProcessor(device))
        yield


def _call(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
    return function(*args)


def _around_a_call(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Replaces what ``checkpoint`` does before and after calling its function: nothing."""
    yield


def _convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Implements ``Module.to`` and the like inside a forward. Torch replaces the data of a parameter, or swaps fake
    parameters, and the gradient would go to the replacement. Here the conversion is an operation with a gradient, and a
    parameter that needs no conversion stays the same."""
    for child in module.children() if recurse else ():
        replacements.convert_module(child, function)
    with torch.enable_grad():
        kinds: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module))
        for tensors in kinds:
            for key, tensor in tensors.items():
                tensors[key] = tensor if tensor is None else function(tensor)
    return module


def _stays(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """Replaces the method that moves a tensor to the device it is traced on."""
    return tensor


class _TraceableFunctions(TorchFunctionMode):
    """Replaces dropout, attention with dropout, sparse embeddings, covariances, counts and a loss, wherever they are
    imported."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in COVARIANCES:
            return covariance(*args, **kwargs)
        if func in CORRELATIONS:
            return correlation(*args, **kwargs)
        if func in (torch.bincount, Tensor.bincount):
            return _counts(func, *args, **kwargs)
        if func is torch.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and _dropout_of(*args, **kwargs):
            return _attention(*args, **kwargs)
        if func in (torch.embedding, F.embedding):
            return func(*args[: 4 if func is torch.embedding else 6], **{**kwargs, "sparse": False})
        if func is F.gaussian_nll_loss:
            with patch.object(torch, "any", lambda _negative: False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _counts(func: Any, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if not minlength or input.is_floating_point():
        counts: Tensor = func(input, weights, minlength)
        return counts
    if weights is None:
        added = torch.ones_like(input, dtype=torch.int64)
    else:
        added = weights if weights.dtype == torch.float32 else weights.double()
    return added.new_zeros(minlength).scatter_add(0, input.long(), added)


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    return torch.native_dropout(input, p, train)[0] if train and p and input.is_floating_point() else input


def _dropout_of(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **_: Any) -> float:
    return dropout_p


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as its documentation defines it."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return _dropout(safe_softmax(scores, -1), dropout_p, True) @ value


def _batch_norm(module: BatchNorm, x: Tensor) -> Tensor:
    counter, mean, var = module.num_batches_tracked, module.running_mean, module.running_var
    cumulative = module.momentum is None and module.training and module.track_running_stats
    if not cumulative or counter is None or mean is None or var is None:
        return _batch_norm_forward(module, x)
    check_batch_norm_input(module, x)
    counter.add_(1)
    # With a momentum of 1 the running statistics are those of the batch.
    batch_mean, batch_var = torch.zeros_like(mean), torch.zeros_like(var)
    result = F.batch_norm(x, batch_mean, batch_var, module.weight, module.bias, True, 1.0, module.eps)
    share = 1.0 / counter.to(mean.dtype)
    mean.copy_((1 - share) * mean + share * batch_mean)
    var.copy_((1 - share) * var + share * batch_var)
    return result


def _length(of: Any, /) -> Any:
    """``len`` with the symbolic size of a tensor's dim 0; what is behind the builtin can return plain numbers only."""
    if isinstance(of, Tensor) and type(of).__len__ is Tensor.__len__ and of.dim():
        return of.shape[0]
    return _plain_length(of)


def _declared_causal(_mask: Tensor | None, is_causal: bool | None = None, _size: int | None = None) -> bool:
    return bool(is_causal)


@contextmanager
def _without_fast_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def every_module(enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Calls ``enter`` before and ``leave`` after the forward of any module, through torch's global hooks, so that the
    model itself is not changed."""
    before = module_hooks.register_module_forward_pre_hook(enter)
    after = module_hooks.register_module_forward_hook(leave)
    try:
        yield
    finally:
        before.remove()
        after.remove()
