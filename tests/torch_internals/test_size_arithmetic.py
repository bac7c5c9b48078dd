"""Arithmetic of symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.torch_internals.fake_tensors import FakeTensorMode, expression_of, hint_of, new_symbol, shape_environment
from autopar.torch_internals.size_arithmetic import remembered_arithmetic


def size_in(environment: ShapeEnv, hint: int = 7) -> torch.SymInt:
    return new_symbol(environment, "batch", hint)


def test_results_are_torchs_own() -> None:
    size = size_in(shape_environment())
    operations: list[Callable[[], torch.SymInt | torch.SymBool]] = [
        lambda: size + 3,
        lambda: 3 - size,
        lambda: size * size,
        lambda: size == 7,
        lambda: size < 3,
        lambda: size * 4 >= size + 4,
    ]
    plain = [(expression_of(each()), each().node.hint, type(each())) for each in operations]
    with remembered_arithmetic():
        for _ in range(2):
            assert [(expression_of(each()), each().node.hint, type(each())) for each in operations] == plain


def test_equal_operations_are_computed_once() -> None:
    size, computed = size_in(shape_environment()), list[str]()
    add = SymNode._add  # type: ignore[attr-defined]

    def counted(left: SymNode, right: SymNode) -> SymNode:
        computed.append(f"{left} + {right}")
        result: SymNode = add(left, right)
        return result

    with patch.object(SymNode, "_add", counted), remembered_arithmetic():
        first, second, _other = size + 3, size + 3, size + 4
    assert len(computed) == 2
    assert first.node is not second.node, "a tracer would take them for the same size"


def test_sizes_of_other_traces_are_other_sizes() -> None:
    with remembered_arithmetic():
        first, second = size_in(shape_environment()) + 3, size_in(shape_environment(), 11) + 3
    assert first.node.shape_env is not second.node.shape_env
    assert (hint_of(first), hint_of(second)) == (10, 14)


def test_what_is_learned_of_a_size_counts() -> None:
    environment = shape_environment()
    size = size_in(environment)
    with remembered_arithmetic():
        before = size + 3
        assert int(size) == 7  # Fixes it.
        after = size + 3
    assert expression_of(before) == expression_of(after) == 10
    assert int(after) == 10


def test_operations_that_a_graph_records_are_recorded() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(x.shape[0] + 3) * (x.shape[0] + 3)

    with FakeTensorMode(shape_env=(environment := shape_environment())):
        x = torch.empty(size_in(environment))
    plain = make_fx(twice)(x)
    with remembered_arithmetic():
        assert str(make_fx(twice)(x).graph) == str(plain.graph)


def test_torch_is_put_back() -> None:
    before = SymNode._mul  # type: ignore[attr-defined]
    with pytest.raises(ValueError), remembered_arithmetic():
        raise ValueError
    assert SymNode._mul is before  # type: ignore[attr-defined]
