"""Random draws inside compiled pieces: the numbers of uncompiled ones, bit by bit, without a wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import autopar
from autopar import Layout, Options
from autopar.ir.node import SAVED_ACTIVATION
from autopar.ir.placements import Placement, StridedShard, local_runs, local_shape
from autopar.ir.program import Section
from autopar.ops.masked import LOCAL_OPS
from autopar.ops.random import filled, loops_of, position_strides, uniform_bits
from autopar.runtime.execute import compiled_pieces
from autopar.runtime.execute.compiled_pieces import Compilation, with_pieces
from autopar.runtime.execute.piece_draws import with_streams
from autopar.runtime.execute.pieces import split
from autopar.runtime.execute.section_code import compile_section
from tests.helpers.marks import slow_rows_but
from tests.helpers.models import Case
from tests.helpers.planning import CLUSTER
from tests.passes.test_draw_again import dropping_gpt2

CPU = torch.device("cpu")
BOOLEAN, SINGLE = "torch.bool", "torch.float32"


def state(step: int = 3, piece: int = 0) -> torch.Tensor:
    return torch.tensor([11, 0, step, piece])


def draw(name: str, size: tuple[int, ...], dtype: str, own: str = "", **rest: Any) -> str:
    options = "".join(f", {key}={list(value) if isinstance(value, tuple) else value}" for key, value in rest.items())
    return f'autopar.{name}.default(%state, {list(size)}{own}, dtype={dtype}, device=device("cpu"){options})'


def section(*draws: str) -> Section:
    """Each draw multiplies a value that is as large, and is returned too."""
    lines = ["forward(%state, %x):"]
    for n, each in enumerate(draws):
        lines.append(f"%d{n} = {each}  @layers.{n}")
        lines.append(f"%c{n} = aten._to_copy.default(%d{n}, dtype=torch.float32)  @layers.{n}")
        lines.append(f"%y{n} = aten.mul.Tensor(%x, %c{n})  @layers.{n}")
    names = ", ".join(f"%d{n}, %y{n}" for n in range(len(draws)))
    return Section.from_text("\n  ".join(lines) + f"\n  return {names}\n")


def both(made: Section, *inputs: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """What a section computes as it is, and what it does with all but the streams in compiled pieces."""
    compilation = Compilation(CPU)
    pieces, operations = with_pieces(made, LOCAL_OPS, lambda each: compile_section(each, LOCAL_OPS, CPU), compilation)
    first, *others = (i.op for i in pieces.instructions)
    assert first == "autopar.streams" and others and all(op.startswith("compiled.") for op in others), str(pieces)
    expected = compile_section(made, LOCAL_OPS, CPU)(list(inputs))
    found = compile_section(pieces, operations, CPU)(list(inputs))
    assert not compilation.problems
    return expected, found


def check(made: Section, *inputs: torch.Tensor) -> None:
    expected, found = both(made, *inputs)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs)


def test_compiled_draws_have_the_bits_of_uncompiled_ones() -> None:
    """Odd sizes, vectors and tails of vectors, blocks that end inside of a row; a batch whose samples are dim 1."""
    x = torch.randn(5, 7, 1031)
    size = tuple(x.shape)
    made = section(
        draw("bernoulli", size, BOOLEAN, ", 0.9", place=4),
        draw("bernoulli", size, SINGLE, ", 0.3", place=5, samples=(1, 5 * 1031)),
        draw("uniform", size, SINGLE, place=6),
        draw("uniform", size, "torch.float64", place=7),
        draw("random_bits", size, "torch.int64", place=8),
    )
    check(made, state(), x)
    check(made, state(step=4), x)


def test_low_precision_and_few_elements() -> None:
    x = torch.randn(3)
    made = section(
        draw("uniform", (3,), "torch.bfloat16", place=1),
        draw("uniform", (3,), "torch.float16", place=2),
        draw("bernoulli", (3,), BOOLEAN, ", 1.0", place=3),
        draw("bernoulli", (3,), BOOLEAN, ", 0.0", place=3),
    )
    check(made, state(), x)


SHARDS: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]] = [
    ((7, 10, 9), (3,), (Shard(0),)),
    ((7, 10, 9), (3,), (Shard(2),)),
    ((7, 10, 9), (2, 2), (Shard(0), Shard(1))),
    ((12, 5), (2, 3), (StridedShard(0, 3), Shard(0))),
]


@pytest.mark.parametrize(("shape", "mesh", "placements"), slow_rows_but([3], SHARDS), ids=str)
def test_shards_of_uneven_dims(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank draws its own part; ranks with parts of one size share code."""
    compiled = counted(monkeypatch)
    sizes = set()
    for coordinate in torch.cartesian_prod(*map(torch.arange, mesh)).reshape(-1, len(mesh)).tolist():
        runs = [
            (start * stride, count, step * stride)
            for dim, stride in enumerate(position_strides(shape, ()))
            for start, count, step in local_runs(shape, placements, mesh, coordinate, dim)
        ]
        first = sum(start for start, _, _ in runs)
        loops = {"counts": tuple(count for _, count, _ in runs), "strides": tuple(step for _, _, step in runs)}
        size = local_shape(shape, placements, mesh, tuple(coordinate))
        sizes.add(size)
        check(
            section(draw("bernoulli", size, BOOLEAN, ", 0.5", place=2, first=first, **loops)), state(), torch.ones(size)
        )
    assert len(compiled) == len(sizes)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The inputs of each piece that is compiled. Code of earlier tests is not used."""
    seen: list[Any] = []
    compile_function = compiled_pieces.compile_function

    def counting(function: Any, inputs: Any) -> Any:
        seen.append(inputs)
        return compile_function(function, inputs)

    monkeypatch.setattr(compiled_pieces, "compile_function", counting)
    codes: Any = {}
    monkeypatch.setattr(compiled_pieces, "_CODE", codes)
    return seen


def test_microbatches_steps_and_layers_run_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The microbatch, the step and the place of the draw are in its stream: nothing is compiled again."""
    compiled = counted(monkeypatch)
    x, whole = torch.ones(2, 33), torch.ones(6, 33)
    half = section(*(draw("bernoulli", (2, 33), BOOLEAN, ", 0.5", place=p, samples=(0, 66)) for p in (1, 2)))
    full = section(*(draw("bernoulli", (6, 33), BOOLEAN, ", 0.5", place=p, samples=(0, 33)) for p in (1, 2)))
    for step in (0, 1):
        expected = compile_section(full, LOCAL_OPS, CPU)([state(step), whole])
        for piece in range(3):
            _, found = both(half, state(step, piece), x)
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs[2 * piece : 2 * piece + 2])
    assert len(compiled) == 1


def test_streams_are_made_once_in_a_section() -> None:
    made = section(*(draw("bernoulli", (4,), BOOLEAN, ", 0.5", place=p) for p in range(3)))
    rewritten = with_streams(made)
    assert [i.op for i in rewritten.instructions].count("autopar.streams") == 1
    assert rewritten.instructions[0].args[1:] == ((0, 1, 2), (0, 0, 0), (0, 0, 0))
    assert with_streams(rewritten) == rewritten
    assert len({piece.canonical for piece in split(rewritten).pieces.values()}) == 1


def test_what_cannot_be_compiled_draws_as_it_did() -> None:
    """The normal distribution's function is another library's when compiled, and indices of loops have 32 bits."""
    normal = section(draw("normal", (4,), SINGLE, place=1))
    assert with_streams(normal) == normal
    large = section(draw("bernoulli", (1 << 31,), BOOLEAN, ", 0.5"))
    assert with_streams(large) == large
    assert (
        with_streams(section(draw("bernoulli", (2, 1 << 30), BOOLEAN, ", 0.5"))).instructions[0].op == "autopar.streams"
    )


def test_positions_beyond_32_bits() -> None:
    """Of a tensor with more than 2^31 elements, the last ones: compiled, only these are drawn."""
    rows, width = 5, 1 << 30
    text = draw("bernoulli", (rows, width), BOOLEAN, ", 0.5", place=1)
    last = f"aten.slice.Tensor(%d, 1, {width - 100}, {width})"
    made = Section.from_text(f"""forward(%state, %x):
      %d = {text}
      %last = {last}
      %c = aten._to_copy.default(%last, dtype=torch.float32)
      %y = aten.mul.Tensor(%x, %c)
      return %y
      """)
    options = {"first": width - 100, "counts": (rows, 100), "strides": (width, 1)}
    part = section(draw("bernoulli", (rows, 100), BOOLEAN, ", 0.5", place=1, **options))
    compilation = Compilation(CPU)
    pieces, operations = with_pieces(made, LOCAL_OPS, lambda each: compile_section(each, LOCAL_OPS, CPU), compilation)
    (found,) = compile_section(pieces, operations, CPU)([state(), torch.ones(rows, 100)])
    assert not compilation.problems
    assert torch.equal(found, compile_section(part, LOCAL_OPS, CPU)([state(), torch.ones(rows, 100)])[1])


def test_streams_may_be_tensors() -> None:
    """A draw that is in no piece takes its stream without reading it, on a GPU."""
    shape, loops = (3, 50), loops_of((3, 50), (64, 1))
    streams: list[Any] = [(123, 457), tuple(torch.tensor([123, 457]))]
    expected, found = (filled(uniform_bits(torch.float32), each, shape, torch.float32, CPU, loops) for each in streams)
    assert torch.equal(found, expected)


class Dropping(nn.Module):
    """Equal layers that drop, of a width that divides unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Dropout(0.3), nn.Linear(20, 8)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(layer(x), 0.2)
        return x.square().mean()


def dropping() -> Case:
    torch.manual_seed(0)
    return Dropping(), (torch.randn(8, 8),)


def named(value: Any) -> str:
    """A name of a parameter that is the same in every process."""
    return value.__name__ if callable(value) else "-".join(map(str, value["layout"].given))


LAYOUTS: list[tuple[Callable[[], Case], dict[str, Any]]] = [
    (dropping, {"layout": Layout(data=2)}),
    (dropping_gpt2, {"layout": Layout(data=2)}),
    (dropping_gpt2, {"layout": Layout(tensor=2)}),
    (dropping_gpt2, {"layout": Layout(data=2, microbatch=2)}),
    (dropping_gpt2, {"layout": Layout(pipeline=2, schedule="zb-h1", microbatch=2)}),
    (dropping_gpt2, {"layout": Layout(pipeline=2, schedule="1f1b", microbatch=2, recompute="full")}),
]


@pytest.mark.parametrize(("source", "options"), slow_rows_but([0], LAYOUTS), ids=named)
def test_gradients_under_compiled_dropout(source: Callable[[], Case], options: dict[str, Any]) -> None:
    """Those of one process with the same draws; no plan saves a mask, and every piece is compiled."""
    model, batch = source()
    given = Options(compile=True, **options)
    report = autopar.verify(model, 2, batch, options=given, cluster=CLUSTER, timeout=900)
    assert report.ok and report.draws, str(report)
    assert report.plan.warnings == ()
    draws = {name for name, node in report.plan.nodes.items() if node.op == "autopar.bernoulli.default"}
    saved = (node for node in report.plan.nodes.values() if node.op == SAVED_ACTIVATION)
    assert draws and not [node for node in saved if not draws.isdisjoint(node.operands)]
