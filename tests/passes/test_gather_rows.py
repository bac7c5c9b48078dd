"""An index with a position for each sample as a gather: what it says, that it computes the same, and that microbatches
divide it, and only it."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.passes.normalise.gather_rows import GatherRows
from autopar.passes.pipeline.microbatch import microbatch
from tests.helpers.interpret import interpret
from tests.helpers.microbatches import run_microbatches
from tests.helpers.pass_text import check
from tests.zoo.check import compare

READ = """graph(b=4)
%x: f32[b, 9, 5] = input("x")
%i: i64[b] = input("i")
%r: i64[b] = aten.arange.default(b)
%y: f32[b, 5] = aten.index.Tensor(%x, [%r, %i])
return output "0" = %y
"""


def test_it_reads() -> None:
    check(
        GatherRows(),
        READ,
        """graph(b=4)
        %x: f32[b, 9, 5] = input("x")
        %i: i64[b] = input("i")
        %r: i64[b] = aten.arange.default(b)
        %y_rows_1: b8[b] = aten.lt.Scalar(%i, 0)
        %y_rows_2: i64[b] = aten.add.Tensor(%i, 9)
        %y_rows_3: i64[b] = aten.where.self(%y_rows_1, %y_rows_2, %i)
        %y_rows_5: i64[b, 1, 1] = aten.reshape.default(%y_rows_3, [b, 1, 1])
        %y_rows_6: i64[b, 1, 5] = aten.expand.default(%y_rows_5, [b, 1, 5])
        %y_rows_7: f32[b, 1, 5] = aten.gather.default(%x, 1, %y_rows_6)
        %y: f32[b, 5] = aten.reshape.default(%y_rows_7, [b, 5])
        return output "0" = %y
        """,
    )


@pytest.mark.parametrize(("accumulate", "op"), [("True", "scatter_add.default"), ("False", "scatter.src")])
def test_it_writes(accumulate: str, op: str) -> None:
    check(
        GatherRows(),
        f"""graph(b=4)
        %x: f32[b, 9] = input("x")
        %i: i32[b, 1] = input("i")
        %r: i64[b] = aten.arange.start_step(0, b, 1)
        %c: i64[b, 1] = aten.reshape.default(%r, [b, 1])
        %v: f32[] = input("v")
        %y: f32[b, 9] = aten.index_put.default(%x, [%c, %i], %v, {accumulate})
        return output "0" = %y
        """,
        f"""graph(b=4)
        %x: f32[b, 9] = input("x")
        %i: i32[b, 1] = input("i")
        %r: i64[b] = aten.arange.start_step(0, b, 1)
        %c: i64[b, 1] = aten.reshape.default(%r, [b, 1])
        %v: f32[] = input("v")
        %y_rows_1: i64[b, 1] = aten._to_copy.default(%i, dtype=torch.int64)
        %y_rows_2: b8[b, 1] = aten.lt.Scalar(%y_rows_1, 0)
        %y_rows_3: i64[b, 1] = aten.add.Tensor(%y_rows_1, 9)
        %y_rows_4: i64[b, 1] = aten.where.self(%y_rows_2, %y_rows_3, %y_rows_1)
        %y_rows_5: f32[1, 1] = aten.reshape.default(%v, [1, 1])
        %y_rows_6: f32[b, 1] = aten.expand.default(%y_rows_5, [b, 1])
        %y: f32[b, 9] = aten.{op}(%x, 1, %y_rows_4, %y_rows_6)
        return output "0" = %y
        """,
    )


NOT_ALIGNED = {
    "from one on": ("%r: i64[b] = aten.arange.start(1, b + 1)", "[%r, %i]"),
    "every second": ("%r: i64[b] = aten.arange.start_step(0, 2*b, 2)", "[%r, %i]"),
    "in the other order": ("%a: i64[b] = aten.arange.default(b)\n%r: i64[b] = aten.flip.default(%a, [0])", "[%r, %i]"),
    "shifted": ("%a: i64[b] = aten.arange.default(b)\n%r: i64[b] = aten.roll.default(%a, [1], [0])", "[%r, %i]"),
    "of given samples": ('%r: i64[b] = input("r")', "[%r, %i]"),
    "of a part": (
        "%a: i64[2*b] = aten.arange.default(2*b)\n%r: i64[b] = aten.slice.Tensor(%a, 0, 0, b, 1)",
        "[%r, %i]",
    ),
    "of a product": ("%a: i64[b] = aten.arange.default(b)\n%r: i64[b] = aten.mul.Tensor(%a, %a)", "[%r, %i]"),
    "one index": ("%r: i64[b] = aten.arange.default(b)", "[%i]"),
    "a count of the other dim": ("%r: i64[9] = aten.arange.default(9)", "[%i]"),
}


@pytest.mark.parametrize("name", NOT_ALIGNED)
def test_other_indices_stay(name: str) -> None:
    line, indices = NOT_ALIGNED[name]
    text = READ.replace("%r: i64[b] = aten.arange.default(b)", line).replace("[%r, %i]", indices)
    if indices == "[%i]":
        text = text.replace("%y: f32[b, 5]", "%y: f32[b, 9, 5]")
    graph = Graph.from_text(text)
    assert GatherRows()(graph) is graph


def test_two_counts_only_move_dims() -> None:
    graph = Graph.from_text("""graph(b=4)
    %x: f32[b, 9] = input("x")
    %r: i64[b] = aten.arange.default(b)
    %c: i64[b, 1, 1] = aten.reshape.default(%r, [b, 1, 1])
    %s: i64[9] = aten.arange.default(9)
    %y: f32[b, 1, 9] = aten.index.Tensor(%x, [%c, %s])
    return output "0" = %y
    """)
    assert GatherRows()(graph) is graph


def sizes(shape: Any) -> str:
    return f"[{', '.join(map(str, shape))}]"


@st.composite
def indexing(draw: st.DrawFn) -> dict[str, Any]:
    """An index of a tensor of 2 to 4 dims by a count of one dim and any positions of another."""
    rank = draw(st.integers(2, 4))
    shape = draw(st.lists(st.integers(2, 4), min_size=rank, max_size=rank))
    own, along = draw(st.permutations(range(rank)))[:2]
    shape[own] = 6
    block = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3))
    counted = draw(st.integers(0, len(block) - 1))
    block[counted] = shape[own]
    count = [size if dim == counted or draw(st.booleans()) else 1 for dim, size in enumerate(block)]
    other = [size if draw(st.booleans()) else 1 for size in block]
    other = other[draw(st.integers(0, len(other))) :]
    together = list(torch.broadcast_shapes(tuple(count), tuple(other)))
    return {"shape": shape, "own": own, "along": along, "count": count, "other": other, "block": together,
            "counted": counted, "dtype": draw(st.sampled_from(["i64", "i32"]))}  # fmt: skip


def graph_of(case: dict[str, Any], write: str | None, count: str = "%a") -> Graph:
    """The index as a read, or as a write with ``accumulate`` ``write``; ``count``: which of the count's orders."""
    shape, own, along, block = case["shape"], case["own"], case["along"], case["block"]
    indices = ["None"] * len(shape)
    indices[own], indices[along] = "%c", "%i"
    adjacent = abs(own - along) == 1
    kept = [size for dim, size in enumerate(shape) if dim not in (own, along)]
    start = min(own, along) if adjacent else 0
    result = [*kept[:start], *block, *kept[start:]]
    thin = [size if dim == case["counted"] else 1 for dim, size in enumerate(case["count"])]
    lines = [
        "graph()",
        f'%x: f64{sizes(shape)} = input("x")',
        f'%i: {case["dtype"]}{sizes(case["other"])} = input("i")',
        f"%a: i64[{shape[own]}] = aten.arange.default({shape[own]})",
        f"%flipped: i64[{shape[own]}] = aten.flip.default(%a, [0])",
        f"%t: i64{sizes(thin)} = aten.reshape.default({count}, {sizes(thin)})",
        f"%c: i64{sizes(case['count'])} = aten.expand.default(%t, {sizes(case['count'])})",
    ]
    if write is None:
        lines.append(f"%y: f64{sizes(result)} = aten.index.Tensor(%x, [{', '.join(indices)}])")
    else:
        lines.append(f'%v: f64{sizes(result)} = input("v")')
        lines.append(f"%y: f64{sizes(shape)} = aten.index_put.default(%x, [{', '.join(indices)}], %v, {write})")
    return Graph.from_text("\n".join([*lines, 'return output "0" = %y']))


def values_of(case: dict[str, Any], graph: Graph) -> dict[str, torch.Tensor]:
    limit = case["shape"][case["along"]]
    torch.manual_seed(math.prod(case["shape"]) + len(case["block"]))
    dtype = torch.int64 if case["dtype"] == "i64" else torch.int32
    made = {n.target: torch.randn([int(s) for s in n.type.shape], dtype=torch.float64) for n in graph.inputs}
    return made | {"i": torch.randint(-limit, limit, case["other"], dtype=dtype)}


@hypothesis.given(case=indexing(), write=st.sampled_from([None, "True"]))
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
def test_the_same_numbers(case: dict[str, Any], write: str | None) -> None:
    graph = graph_of(case, write)
    found = GatherRows()(graph)
    assert not any("index" in node.op for node in found), found
    values = values_of(case, graph)
    compare(interpret(found, values), interpret(graph, values), str(case))


@hypothesis.given(case=indexing(), write=st.sampled_from([None, "True"]))
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_microbatches_take_their_own_samples(case: dict[str, Any], write: str | None) -> None:
    """Divided along the counted dim, however the positions are given; samples in another order are refused."""
    graph = graph_of(case, write)
    counted = next((n for n in graph if n.name == "c"), None)
    assert counted is not None
    own = case["counted"] - len(case["block"]) + len(case["other"])
    inputs: dict[str, int | None] = {"x": case["own"], "i": own if own >= 0 and case["other"][own] > 1 else None}
    if write is not None:
        kept = [dim for dim in range(len(case["shape"])) if dim not in (case["own"], case["along"])]
        adjacent = abs(case["own"] - case["along"]) == 1
        start = min(case["own"], case["along"]) if adjacent else 0
        inputs["v"] = min(start, len(kept)) + case["counted"]
    values = values_of(case, graph)
    for count in (2, 3):
        made = microbatch(as_model(GatherRows()(graph)), count, inputs)
        compare(run_microbatches(made, with_weight(values)), interpret(graph, values), str(case))
    flipped = GatherRows()(graph_of(case, write, "%flipped"))
    with pytest.raises(OptionsError, match="couples the samples"):
        microbatch(as_model(flipped), 2, inputs)


def as_model(graph: Graph) -> Graph:
    """The graph with a parameter in what is indexed: what depends on data alone could come from the prelude."""
    text = graph.to_text()
    line = next(line for line in text.splitlines() if line.lstrip().startswith("%x:"))
    kind = line.split(":")[1].split("=")[0].strip()
    wide = [
        line.replace("%x:", "%given:"),
        '%w: f64[] = param("w")',
        f"%x: {kind} = aten.mul.Tensor(%given, %w)",
    ]
    return Graph.from_text(text.replace(line, "\n".join(wide)))


def with_weight(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return values | {"w": torch.ones((), dtype=torch.float64)}
