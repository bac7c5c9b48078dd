"""Results are written into operands that nothing reads afterwards, and into no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.ir.node import Value
from autopar.ir.program import Instruction, Section
from autopar.ops.index_range import take_out_of_range
from autopar.runtime.execute.in_place import ALLOCATING, WRITING, in_place, writing
from autopar.runtime.execute.index_guards import GUARDED
from autopar.runtime.execute.section_code import SectionCode, compile_section
from autopar.runtime.execute.section_source import Source
from autopar.runtime.execute.torch_operations import resolve_aten

CPU = torch.device("cpu")
V = Value
EXP = Instruction("a", "aten.exp.default", (V("x"),))


def places(*instructions: Instruction, outputs: tuple[Value, ...] = (V("y"),)) -> dict[str, tuple[int, ...]]:
    return in_place(Section("forward", ("x",), instructions, outputs))


def add(name: str, left: str, right: str, **kwargs: Any) -> Instruction:
    return Instruction(name, "aten.add.Tensor", (V(left), V(right)), tuple(kwargs.items()))


def written(name: str, where: tuple[int, ...]) -> Any:
    op = f"aten.{name}.Tensor"
    return writing(op, where, resolve_aten(op), resolve_aten(WRITING[op]))


def test_either_operand_of_a_sum_unless_the_second_is_scaled() -> None:
    other = Instruction("b", "aten.neg.default", (V("x"),))
    assert places(EXP, other, add("y", "a", "b")) == {"y": (0, 1)}
    assert places(EXP, other, add("y", "a", "b", alpha=2)) == {"y": (0,)}
    assert places(EXP, add("y", "x", "a")) == {"y": (1,)}


def test_neither_inputs_nor_what_is_read_later() -> None:
    assert places(add("y", "x", "x")) == {}
    assert places(EXP, add("y", "a", "a")) == {}
    assert places(EXP, add("b", "a", "x"), add("y", "b", "a")) == {"y": (0, 1)}
    assert places(EXP, add("y", "a", "x"), outputs=(V("y"), V("a"))) == {}


def test_views_share_the_memory_of_what_they_view() -> None:
    view = Instruction("v", "aten.view.default", (V("a"), (6,)))
    of_input = Instruction("v", "aten.view.default", (V("x"), (6,)))
    assert places(EXP, view, add("y", "v", "x")) == {"y": (0,)}
    assert places(EXP, view, add("b", "a", "x"), add("y", "v", "b")) == {"y": (0, 1)}
    assert places(EXP, view, add("y", "a", "v")) == {}
    assert places(of_input, add("y", "v", "x")) == {}


@pytest.mark.parametrize(
    "op", ["autopar.note", "collective.all_reduce", "compiled.piece", "aten.conj_physical.default"]
)
def test_not_what_something_may_have_kept(op: str) -> None:
    assert places(EXP, Instruction("b", op, (V("a"),)), add("y", "a", "x")) == {}


def test_not_lists_of_views() -> None:
    split = Instruction("s", "aten.split.Tensor", (V("a"), 3), results=2)
    assert places(EXP, split, Instruction("y", "aten.add.Tensor", (V("s"), V("s", 1)))) == {}


@pytest.mark.parametrize(
    "left, right",
    [
        (torch.ones(2, 1), torch.ones(2, 3)),
        (torch.ones(2, 3), torch.ones(2, 1)),
        (torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3)),
        (torch.ones(2, 3, dtype=torch.int64), 0.5),
        (torch.ones(2, 3), 2j),
        (torch.ones(1, 3).expand(2, 3), torch.ones(2, 3)),
        (torch.ones(3, 2).t(), torch.ones(2, 3)),
        (torch.ones(()), torch.ones(2)),
    ],
)
def test_a_result_that_is_not_as_the_operand_is_new(left: torch.Tensor, right: Any) -> None:
    before, expected = left.clone(), left + right
    if left.is_contiguous() or not isinstance(right, torch.Tensor):
        right = right.t().contiguous().t() if isinstance(right, torch.Tensor) and right.dim() == 2 else right
    found = written("add", (0, 1))(left, right)
    assert torch.equal(found, expected) and found.dtype == expected.dtype
    assert torch.equal(left, before) and found.untyped_storage().data_ptr() != left.untyped_storage().data_ptr()


def test_a_result_as_the_operand_has_its_memory() -> None:
    left, right = torch.ones(2, 3), torch.full((2, 3), 2.0)
    assert written("sub", (0,))(left, right) is left and left.tolist() == [[-1.0] * 3] * 2
    assert written("mul", (1,))(left, right) is right and right.tolist() == [[-2.0] * 3] * 2


ACTIVATIONS = [
    (op, approximate)
    for op in sorted(op for op in WRITING if op.endswith(".default"))
    for approximate in (("none", "tanh") if "gelu" in op else ("",))
]


def activation(op: str, approximate: str) -> Section:
    """An activation, or the gradient of one, of a value that nothing else reads."""
    rest = (V("z"), *((0.5,) if "threshold" in op else ())) if "backward" in op else ()
    kwargs = (("approximate", approximate),) if approximate else ()
    double = Instruction("a", "aten.mul.Tensor", (V("x"), 2.0))
    return Section("forward", ("x", "z"), (double, Instruction("y", op, (V("a"), *rest), kwargs)), (V("y"),))


def _laid_out(name: str, dtype: torch.dtype) -> torch.Tensor:
    x = torch.linspace(-3, 3, 41 * 3).to(dtype)
    return x.view(41, 3) if name == "rows" else x.view(3, 41).t()


@pytest.mark.parametrize(("layout", "saved"), [("rows", "rows"), ("columns", "rows"), ("rows", "columns")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "approximate"), ACTIVATIONS)
def test_activations_in_place_have_the_same_numbers(
    op: str, approximate: str, dtype: torch.dtype, layout: str, saved: str
) -> None:
    section = activation(op, approximate)
    is_fitting = layout == "rows" and (saved == "rows" or "backward" not in op)
    assert in_place(section) == {"y": (0,)}
    found = {}
    for reuse in (False, True):
        x, z = _laid_out(layout, dtype), _laid_out(saved, dtype) / 3
        before = x.clone(), z.clone()
        with _Allocations() as watched:
            (found[reuse],) = SectionCode(section, Source(section, {}, CPU, reuse=reuse), "").function([x, z])
        assert torch.equal(x, before[0]) and torch.equal(z, before[1])
        assert (WRITING[op] in watched.called) == (reuse and is_fitting)
    assert torch.equal(found[False], found[True]) and found[False].stride() == found[True].stride()


@pytest.mark.parametrize("value", [torch.ones(4, 3), torch.ones(1, 3, dtype=torch.float64)])
def test_a_gradient_of_another_type_is_new(value: torch.Tensor) -> None:
    op, gradient = "aten.threshold_backward.default", torch.ones(1, 3)
    expected = resolve_aten(op)(gradient, value, 0)
    found = writing(op, (0,), resolve_aten(op), resolve_aten(WRITING[op]))(gradient, value, 0)
    assert found is not gradient and found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("label", [3, 4, -1])
def test_an_index_out_of_range_is_noted(label: int) -> None:
    zeros = Instruction("zeros", "aten.full.default", ((2, 4), 0.0))
    scatter = Instruction("y", "aten.scatter.value", (V("zeros"), 1, V("x"), 1.0))
    section = Section("forward", ("x",), (zeros, scatter), (V("y"),))
    assert in_place(section) == {"y": (0,)}
    take_out_of_range()
    (found,) = compile_section(section, GUARDED, CPU)([torch.tensor([[0], [label]])])
    assert (take_out_of_range() == []) == (0 <= label < 4) == bool(found.isfinite().all())


STEPS = {
    "aten.add.Tensor": 2,
    "aten.sub.Tensor": 2,
    "aten.mul.Tensor": 2,
    "aten.exp.default": 1,
    "aten.clone.default": 1,
    "aten.alias.default": 1,
    "aten.t.default": 1,
    "aten.view.default": 1,
    "aten.conj_physical.default": 1,
    "autopar.keep": 1,
}


@st.composite
def sections(draw: st.DrawFn) -> Section:
    """Programs on 3 x 3 matrices whose every step reads any earlier values."""
    names, steps = ["x", "z"], []
    for index in range(draw(st.integers(2, 14))):
        op = draw(st.sampled_from(sorted(STEPS)))
        operands = tuple(V(draw(st.sampled_from(names))) for _ in range(STEPS[op]))
        names.append(f"v{index}")
        steps.append(Instruction(names[-1], op, (*operands, *(((3, 3),) if op == "aten.view.default" else ()))))
    outputs = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    return Section("forward", ("x", "z"), tuple(steps), tuple(map(V, outputs)))


@settings(max_examples=300, deadline=None)
@given(sections())
def test_random_programs_compute_the_same(section: Section) -> None:
    given, kept = [torch.rand(3, 3) - 0.5, torch.rand(3, 3) - 0.5], []

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept.append((value, value.clone()))
        return value

    found = {}
    for reuse in (False, True):
        inputs = [value.clone() for value in given]
        code = SectionCode(section, Source(section, {"autopar.keep": keep}, CPU, reuse=reuse), "")
        found[reuse] = [value.clone() for value in code.function(list(inputs))]
        assert all(torch.equal(a, b) for a, b in zip(inputs, given, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found[False], found[True], strict=True))
    assert all(torch.equal(value, before) for value, before in kept)


class _Allocations(TorchDispatchMode):
    """Which operations returned memory that they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()
        self.shared: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given, made = (set(_memories(tree)) for tree in ((args, kwargs), result))
        self.called.add(str(function))
        if given & made or len(made) < len(list(_memories(result))):
            self.shared.add(str(function))
        return result


def _memories(tree: Any) -> Iterator[int]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.numel())
    return (tensor.untyped_storage().data_ptr() for tensor in tensors)


def _samples() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Arguments for each operation that is said to allocate, such that an operation which can return its operand
    would: sizes of one, powers of one, sums over nothing."""
    x, image, ids = torch.rand(1, 1), torch.rand(2, 1, 2, 2), torch.zeros(1, 1, dtype=torch.int64)
    yes = torch.ones(1, 1, dtype=torch.bool)
    norm = (torch.zeros(1), torch.ones(1))
    one = {
        "bmm": (x[None], x[None]), "addmm": (x, x, x), "pow": (x, 1), "clamp_min": (x, 0.0), "cat": ([x],),
        "threshold_backward": (x, x, 0), "where": (yes, x, x), "masked_fill": (x, ~yes, 0.0), "full": ([1, 1], 0.0),
        "sum": (x, [0], True), "mean": (x, [0], True), "amax": (x, [0], True), "gather": (x, 0, ids),
        "scatter": (x, 0, ids, x), "scatter.value": (x, 0, ids, 1.0), "index_select": (x, 0, ids[0]),
        "embedding": (x, ids), "embedding_dense_backward": (x[None], ids, 1, -1, False),
        "convolution": (image, torch.ones(1, 1, 1, 1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        "convolution_backward": (image, image, torch.ones(1, 1, 1, 1), [1], [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
                                 [True] * 3),
        "max_pool2d_with_indices": (image, [1, 1]),
        "max_pool2d_with_indices_backward": (image, image, [1, 1], [1, 1], [0, 0], [1, 1], False, image.long()),
        "_log_softmax": (x, 0, False), "_log_softmax_backward_data": (x, x, 0, x.dtype),
        "_softmax": (x, 0, False), "_softmax_backward_data": (x, x, 0, x.dtype),
        "native_layer_norm": (x, [1], norm[1], norm[0], 1e-5),
        "native_layer_norm_backward": (x, x, [1], x, x, norm[1], norm[0], [True] * 3),
        "_native_batch_norm_legit_functional": (image, *reversed(norm), *norm, True, 0.1, 1e-5),
        "_native_batch_norm_legit": (image, *reversed(norm), True, 0.1, 1e-5),
        "native_batch_norm_backward": (image, image, norm[1], *norm, *norm, True, 1e-5, [True] * 3),
    }  # fmt: skip
    two = ("Tensor", "tanh_backward", "sigmoid_backward", "gelu_backward", "silu_backward", "mm")
    for op in sorted(ALLOCATING):
        _, name, overload = op.split(".")
        yield op, one.get(f"{name}.{overload}", one.get(name, (x, x) if overload in two or name in two else (x,)))


@pytest.mark.parametrize("op, args", list(_samples()))
def test_what_is_said_to_allocate_does(op: str, args: tuple[Any, ...]) -> None:
    with torch.no_grad(), _Allocations() as watched:
        resolve_aten(op)(*args)
    assert op in watched.called and op not in watched.shared
