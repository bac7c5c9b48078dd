"""Which calls of torch's test data are tried: of each operation and dtype, some spread over its samples."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

from .wrapped import Subject, called

DTYPES = {"f64": torch.float64, "f32": torch.float32, "c128": torch.complex128, "i64": torch.int64}
DTYPES |= {"f16": torch.float16, "bf16": torch.bfloat16}
OPS = {op.full_name: op for op in op_db}
MODULES = {info.name: info for info in module_db}

# Why an operation has no outcome that says anything about us.
NOT_OURS = {
    **dict.fromkeys(
        ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"),
        "eager's result is whatever was in memory; ours is zero, as tests/test_trace_operations.py checks",
    ),
    **dict.fromkeys((name for name in OPS if "jiterator" in name), "it has kernels for CUDA only"),
}


def spread(items: list[Any], count: int, name: str) -> list[tuple[int, Any]]:
    """``count`` of ``items`` with their positions: the first, the last, and some between at equal distances; one, by
    the name of what they are samples of."""
    if len(items) <= count:
        return list(enumerate(items))
    if count == 1:
        chosen = zlib.crc32(name.encode()) % len(items)
        return [(chosen, items[chosen])]
    at = sorted({round(i * (len(items) - 1) / max(count - 1, 1)) for i in range(count)})
    return [(i, items[i]) for i in at]


def op_subjects(name: str, kind: str, count: int) -> Iterator[Subject]:
    """Calls of the operation in the dtype called ``kind``; none if it does not take it."""
    op = OPS[name]
    for index, sample in spread(_samples(op, DTYPES[kind]), count, name):
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        yield called(f"{name}[{kind}]#{index}", _processed(op, sample), args, kwargs)


def empty_subjects(name: str, kind: str, count: int) -> Iterator[Subject]:
    """Calls of the operation with a tensor that has no elements."""
    op = OPS[name]
    samples = list(enumerate(_samples(op, DTYPES[kind])))
    empty = [(index, sample) for index, sample in samples if _has_empty(sample)]
    for _, (index, sample) in spread(empty, count, name):
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        yield called(f"{name}[{kind}]#{index}", _processed(op, sample), args, kwargs)


def _samples(op: Any, dtype: torch.dtype) -> list[Any]:
    if not op.supports_dtype(dtype, "cpu"):
        return []
    learns = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    return list(_quietly(lambda: list(op.sample_inputs("cpu", dtype, requires_grad=learns))))


def _has_empty(sample: Any) -> bool:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return any(isinstance(leaf, torch.Tensor) and not leaf.numel() for leaf in leaves)


def _processed(op: Any, sample: Any) -> Callable[..., Any]:
    """The operation, and after it what makes its result unique (eigenvectors have a phase)."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return sample.output_process_fn_grad(op(*args, **kwargs))

    return function


def inplace_subjects(name: str, kind: str, count: int) -> Iterator[Subject]:
    """Calls of the operation that write into a copy of its first operand."""
    op, dtype = OPS[name], DTYPES[kind]
    written = op.get_inplace()
    if written is None:
        return

    def function(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return written(x.clone(), *args, **kwargs)

    samples = [s for s in _samples(op, dtype) if isinstance(s.input, torch.Tensor) and not s.broadcasts_input]
    for index, sample in spread(samples, count, name):
        yield called(f"{name}_[{kind}]#{index}", function, (sample.input, *sample.args), sample.kwargs)


def module_subjects(name: str, kind: str, count: int) -> Iterator[Subject]:
    """Calls of the module in training and, where that differs, evaluation."""
    info, dtype = MODULES[name], DTYPES[kind]
    if dtype not in info.dtypes:
        return
    for training in (info.train_and_eval_differ and (True, False)) or (True,):
        made = _quietly(
            lambda mode=training: list(
                info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=False, training=mode)
            )
        )
        for index, given in spread(made, count, name):
            yield _module_subject(info, given, dtype, training, f"{name}[{kind}]#{index}{'' if training else ' eval'}")


def _module_subject(info: Any, given: Any, dtype: torch.dtype, training: bool, name: str) -> Subject:
    torch.manual_seed(0)
    made = given.constructor_input
    module = info.module_cls(*made.args, **{**made.kwargs}).to(dtype).train(training)
    call = given.forward_input
    subject = called(name, module, () if call is None else call.args, {} if call is None else call.kwargs)
    return subject


def _quietly(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """Every operation of ``op_db``."""
    return tuple(OPS)
