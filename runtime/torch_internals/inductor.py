"""Inductor, torch's compiler of graphs, without Dynamo and autograd before it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.torch_internals.fake_tensors import FakeTensorMode, enable_python_dispatcher

Compiled = Callable[[list[Tensor]], Sequence[Any]]
"""From a list of inputs, which it empties, to its outputs."""
Metadata = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""Shape, strides, dtype and device of a tensor."""

_SizeCheck = Callable[[Tensor, tuple[int, ...], tuple[int, ...]], None]
assert_size_stride: _SizeCheck = torch._C._dynamo.guards.assert_size_stride
"""Raises AssertionError if a tensor has other sizes or strides; what code of Inductor calls on its inputs (2.11)."""

# The environment variable that names Inductor's cache folder; Inductor sets it itself if it is not set (2.11).
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def missing_compiler(device: torch.device) -> str | None:
    """Why no code for ``device`` can be compiled here; None if it can. Relies on ``cpp_builder.get_cpp_compiler`` and
    ``has_triton`` (2.11)."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:
            lines = str(error).strip().splitlines()
            return f"there is no C++ compiler ({lines[0] if lines else type(error).__name__})"
        return None
    from torch.utils._triton import has_triton

    return None if has_triton() else "triton is not installed, or does not support the device"


@contextmanager
def caching_in(folder: Path) -> Iterator[None]:
    """Inductor's cache is in ``folder``, unless the environment names one. Relies on the variable being read at each
    use (2.11)."""
    if os.environ.get(_FOLDER):
        yield
        return
    os.environ[_FOLDER] = str(folder)
    try:
        yield
    finally:
        del os.environ[_FOLDER]


def compile_function(function: Callable[[list[Tensor]], list[Any]], inputs: Sequence[Metadata]) -> Compiled:
    """``function``, of ATen operations without random numbers, compiled for inputs of these sizes and strides. Relies
    on ``make_fx``, ``select_decomp_table``, ``_recursive_joint_graph_passes`` and ``compile_fx_inner``, and on the
    options set here (2.11)."""
    from torch._inductor import compile_fx, config
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.fx.traceback import preserve_node_meta

    # One thread: no worker processes, which would outlive the call. A value is rounded to 16 bits wherever the
    # uncompiled program rounds it.
    options = {"compile_threads": 1, "emulate_precision_casts": True}
    # Without an environment for symbolic sizes, of which there are none, Inductor looks nothing up in its cache.
    fake = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    with fake:
        examples = [torch.empty_strided(s, t, dtype=d, device=device) for s, t, d, device in inputs]
    # Kernels are named after the operations that they were made of, which traces keep if asked to.
    with torch.no_grad(), enable_python_dispatcher(), config.patch(options), preserve_node_meta():
        plain = torch.func.functionalize(lambda *values: function(list(values)), remove="mutations")
        with fake:
            graph = make_fx(plain, decomposition_table=select_decomp_table())(*examples)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        with torch._guards.tracing(torch._guards.TracingContext(fake)):
            compile_fx._recursive_joint_graph_passes(graph)
            compiled: Compiled = compile_fx.compile_fx_inner(graph, examples, is_inference=True)
    return compiled
