"""Attention as one operation: every kernel gives torch's numbers, and those for CUDA take what they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from autopar.ops import attention_kernels
from autopar.ops.attention import attention, attention_backward
from autopar.ops.attention_kernels import (
    EFFICIENT,
    FLASH,
    PROCESSOR,
    SHAPES,
    WRITTEN_OUT,
    Kernel,
    kernel_for,
    kernels_of,
)
from autopar.runtime.rehearse.fake_device import fake_device
from autopar.runtime.rehearse.storage_meter import StorageMeter
from autopar.torch_internals.modes import TorchDispatchMode

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
    """On fake tensors: shape functions check shapes, dtypes and devices, not how operands lie in memory."""
    tensors, mask, causal = operands(dtype, **CASES[case])
    with fake_device():
        tensors = [torch.empty(x.shape, dtype=dtype, device="cuda") for x in tensors]
        mask = None if mask is None else torch.empty(mask.shape, dtype=dtype, device="cuda")
        out, sums = attention(*tensors, mask, causal)
        gradients = attention_backward(torch.empty_like(out), *tensors, out, sums, mask, causal)
    assert (out.shape, out.dtype, out.device.type) == (tensors[0].shape, dtype, "cuda")
    assert (sums.shape, sums.dtype) == (tensors[0].shape[:-1], torch.float32)
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, dtype) for x in tensors]


@pytest.mark.parametrize(
    ("dtype", "width", "lengths", "causal", "masked", "capability", "kernel"),
    [
        (torch.bfloat16, 64, (7, 7), True, False, (9, 0), FLASH),
        (torch.float16, 64, (7, 9), False, False, (8, 0), FLASH),
        (torch.bfloat16, 64, (7, 9), True, False, (9, 0), EFFICIENT),  # FlashAttention aligns with the last key.
        (torch.bfloat16, 64, (7, 9), False, True, (9, 0), EFFICIENT),
        (torch.bfloat16, 512, (7, 7), False, False, (9, 0), EFFICIENT),
        (torch.bfloat16, 208, (7, 7), False, False, (8, 9), EFFICIENT),
        (torch.bfloat16, 208, (7, 7), False, False, (9, 0), FLASH),
        (torch.float16, 64, (7, 7), False, False, (7, 5), EFFICIENT),
        (torch.bfloat16, 64, (7, 7), False, False, (7, 5), WRITTEN_OUT),
        (torch.float32, 64, (7, 7), False, False, (9, 0), EFFICIENT),
        (torch.float64, 64, (7, 7), False, False, (9, 0), WRITTEN_OUT),
    ],
)
def test_which_kernel_runs_on_a_gpu(
    dtype: torch.dtype, width: int, lengths: tuple[int, int], causal: bool, masked: bool, capability: tuple[int, int],
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(attention_kernels, "_capability", lambda _device: capability)
    with fake_device():
        query, key = (torch.empty(1, 1, length, width, dtype=dtype, device="cuda") for length in lengths)
        assert kernel_for(query, key, key, query if masked else None, causal) is kernel


def test_which_kernel_runs_elsewhere() -> None:
    x, narrow = torch.empty(1, 1, 2, 8), torch.empty(1, 1, 2, 4)
    assert kernel_for(x, x, x, None, True) is PROCESSOR
    assert kernel_for(x, x, narrow, None, True) is WRITTEN_OUT
    meta = x.to("meta")
    assert kernel_for(meta, meta, meta, None, True) is SHAPES


@pytest.mark.parametrize("gpu", [False, True], ids=["no GPU here", "a GPU here"])
def test_meta_tensors_are_taken_for_those_of_the_device_that_is_meant(
    gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    x, narrow = torch.empty(1, 1, 2, 8, device="meta"), torch.empty(1, 1, 2, 4, device="meta")
    with kernels_of("cuda"):
        assert kernel_for(x, x, x, None, True) is EFFICIENT
        assert kernel_for(*(3 * [x.bfloat16()]), None, True) is FLASH
        assert kernel_for(x, x, narrow, None, True) is WRITTEN_OUT
    with kernels_of("cpu"):
        assert kernel_for(x, x, x, None, True) is SHAPES
        assert kernel_for(x, x, narrow, None, True) is WRITTEN_OUT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "width, value_width, heads, masked", [(8, 8, 4, False), (12, 12, 2, True), (12, 12, 2, False), (8, 4, 4, False)]
)
def test_kernels_for_gpus_allocate_as_much_on_meta_tensors(
    dtype: torch.dtype, width: int, value_width: int, heads: int, masked: bool
) -> None:
    """Grouped heads, rows that are no whole loads, masks, values narrower than keys."""

    def peak(device: str) -> int:
        query = torch.empty(2, 4, 37, width, dtype=dtype, device=device)
        key, value = (torch.empty(2, heads, 37, w, dtype=dtype, device=device) for w in (width, value_width))
        mask = torch.empty(37, 37, dtype=dtype, device=device) if masked else None
        with StorageMeter((query, key, value)) as meter:
            out, sums = attention(query, key, value, mask)
            attention_backward(out, query, key, value, out, sums, mask)
        return meter.peak

    with fake_device():
        on_gpu = peak("cuda")
    with kernels_of("cuda"):
        assert peak("meta") == on_gpu
    assert peak("meta") <= on_gpu


class Calls(TorchDispatchMode):
    """Notes the operands of the kernels, as they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: dict[str, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operands[func.__name__] = args
        return func(*args, **(kwargs or {}))


def test_no_offsets_are_given_to_the_backward_of_flash_attention() -> None:
    """A tensor of offsets, even an empty one, would choose the kernel for ragged sequences."""
    with fake_device(), Calls() as calls:
        x = torch.empty(3, 4, LENGTH, 8, dtype=torch.bfloat16, device="cuda")
        attention_backward(x, x, x, x, *attention(x, x, x, None, True), None, True)
    backward = calls.operands["_scaled_dot_product_flash_attention_backward.default"]
    assert backward[6:8] == (None, None)


@pytest.mark.parametrize("width", [8, 5])
def test_the_backward_of_the_efficient_kernel_gets_its_output_as_it_reads_it(width: int) -> None:
    """As [B, L, H, D] in memory, also where the output was gathered, or is padded."""
    with fake_device(), Calls() as calls:
        x = torch.empty(3, 4, LENGTH, width, device="cuda")
        attention_backward(x, x, x, x, x, torch.empty(3, 4, LENGTH, device="cuda"))
    out = calls.operands["_scaled_dot_product_efficient_attention_backward.default"][5]
    assert out.transpose(1, 2).is_contiguous() and out.shape == (3, 4, LENGTH, 8)


@pytest.mark.parametrize(("start", "width"), [(0, 16), (1, 16), (0, 17)])
def test_rows_of_a_sliced_mask_begin_at_whole_loads(start: int, width: int) -> None:
    with fake_device(), Calls() as calls:
        x, key = torch.empty(3, 4, LENGTH, 8, device="cuda"), torch.empty(3, 4, 16, 8, device="cuda")
        attention(x, key, key, torch.empty(LENGTH, start + width, device="cuda").narrow(-1, start, 16))
    bias = calls.operands["_scaled_dot_product_efficient_attention.default"][3]
    assert bias.shape == (3, 4, LENGTH, 16)
    assert all(step % 16 == 0 for step in (*bias.stride()[:-1], bias.storage_offset()))


def test_a_mask_of_truth_values_is_refused() -> None:
    x = torch.randn(1, 1, 2, 8)
    with pytest.raises(TypeError, match="truth values"):
        attention(x, x, x, torch.ones(2, 2, dtype=torch.bool))
