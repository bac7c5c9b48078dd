"""Attention as one operation: every kernel gives torch's numbers, and those for CUDA take what they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from autopar.ops.attention import attention, attention_backward
from autopar.ops.attention_kernels import (
    EFFICIENT,
    FLASH,
    PROCESSOR,
    SHAPES,
    WRITTEN_OUT,
    Kernel,
    kernel_for,
)
from autopar.torch_internals.fake_tensors import FakeTensorMode

LENGTH, KEYS = 7, 9

Case = dict[str, Any]
CASES: dict[str, Case] = {
    "plain": {},
    "causal": {"causal": True, "keys": LENGTH},
    "mask": {"mask": (LENGTH, KEYS)},
    "mask of keys": {"mask": (3, 1, 1, KEYS)},
    "mask of queries": {"mask": (LENGTH, 1)},
    "grouped": {"heads": 2, "causal": True, "keys": LENGTH},
    "odd width": {"width": 5},
}


def operands(
    dtype: torch.dtype, mask: tuple[int, ...] | None = None, causal: bool = False, heads: int = 4, keys: int = KEYS,
    width: int = 8,
) -> tuple[list[torch.Tensor], torch.Tensor | None, bool]:  # fmt: skip
    """``([query, key, value], mask, causal)``."""
    tensors = [torch.randn(3, 4, LENGTH, width), torch.randn(3, heads, keys, width), torch.randn(3, heads, keys, width)]
    return [x.to(dtype) for x in tensors], None if mask is None else torch.randn(mask, dtype=dtype), causal


def by_torch(
    tensors: list[torch.Tensor], mask: torch.Tensor | None, causal: bool, grad: torch.Tensor
) -> list[torch.Tensor]:
    """The output of torch's own attention, and the gradients of its operands."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    grouped = tensors[0].shape[1] != tensors[1].shape[1]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    return [out, *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("kernel", [PROCESSOR, WRITTEN_OUT], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("case", CASES)
def test_kernels_give_the_numbers_of_torch(case: str, kernel: Kernel) -> None:
    tensors, mask, causal = operands(torch.float64, **CASES[case])
    grad, scale = torch.randn_like(tensors[0]), tensors[0].shape[-1] ** -0.5
    out, sums = kernel.forward(*tensors, mask, causal, scale)
    gradients = kernel.backward(grad, *tensors, out, sums, mask, causal, scale)
    for ours, theirs in zip([out, *gradients], by_torch(tensors, mask, causal, grad), strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs)


def test_a_backward_may_run_another_kernel_than_its_forward() -> None:
    tensors, mask, causal = operands(torch.float64, causal=True, keys=LENGTH)
    grad, scale = torch.randn_like(tensors[0]), 0.3
    for first, second in ((PROCESSOR, WRITTEN_OUT), (WRITTEN_OUT, PROCESSOR)):
        results = first.forward(*tensors, mask, causal, scale)
        own = first.backward(grad, *tensors, *results, mask, causal, scale)
        for ours, theirs in zip(second.backward(grad, *tensors, *results, mask, causal, scale), own, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_row_that_sees_no_key_is_zero_and_so_are_its_gradients() -> None:
    tensors, _, _ = operands(torch.float64)
    mask = torch.zeros(LENGTH, KEYS, dtype=torch.float64)
    mask[2] = -torch.inf
    out, sums = WRITTEN_OUT.forward(*tensors, mask, False, 0.3)
    gradients = WRITTEN_OUT.backward(torch.ones_like(out), *tensors, out, sums, mask, False, 0.3)
    assert not out[:, :, 2].any() and not gradients[0][:, :, 2].any()
    assert all(x.isfinite().all() for x in (out, *gradients))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_of_gpus_take_the_operands_and_give_the_promised_types(case: str, dtype: torch.dtype) -> None:
    """On fake tensors: shape functions and meta kernels check what a kernel is given."""
    tensors, mask, causal = operands(dtype, **CASES[case])
    with FakeTensorMode(), torch.no_grad():
        tensors = [torch.empty(x.shape, dtype=dtype, device="cuda") for x in tensors]
        mask = None if mask is None else torch.empty(mask.shape, dtype=dtype, device="cuda")
        out, sums = attention(*tensors, mask, causal)
        gradients = attention_backward(torch.empty_like(out), *tensors, out, sums, mask, causal)
    assert (out.shape, out.dtype, out.device.type) == (tensors[0].shape, dtype, "cuda")
    assert (sums.shape, sums.dtype) == (tensors[0].shape[:-1], torch.float32)
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, dtype) for x in tensors]


def test_which_kernel_runs() -> None:
    with FakeTensorMode():
        for dtype, width, masked, kernel in (
            (torch.bfloat16, 64, False, FLASH),
            (torch.bfloat16, 64, True, EFFICIENT),
            (torch.bfloat16, 512, False, EFFICIENT),
            (torch.float32, 64, False, EFFICIENT),
            (torch.float64, 64, False, WRITTEN_OUT),
        ):
            query = torch.empty(1, 1, 2, width, dtype=dtype, device="cuda")
            assert kernel_for(query, query if masked else None) is kernel
        assert kernel_for(torch.empty(1, 1, 2, 8), None) is PROCESSOR
        assert kernel_for(torch.empty(1, 1, 2, 8, device="meta"), None) is SHAPES
