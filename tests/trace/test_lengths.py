"""Traces that leave lengths of inputs open: at any length they are the trace of that length."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import FixedLengthError
from autopar.ir.graph import Graph
from autopar.ir.node import TensorType, symbol
from autopar.passes.normalise.standard import normalise
from autopar.trace.lengths import Length, prime_below, real_lengths, varying
from autopar.trace.tracer import Traced, request_for, traced_request
from tests.zoo import decoders, encoders, vision
from tests.zoo.hugging_face import FAMILIES

# They register theirs.
assert decoders and encoders and vision


def traced(model: nn.Module, batch: dict[str, Any], *lengths: Length) -> Traced:
    return traced_request(request_for(model, (), batch, device="cpu", training=True, lengths=lengths))


def text_of(graph: Graph) -> str:
    """With other names for the results: torch names them after sizes too."""
    names = {node.name: node.name if node.is_placeholder else f"n{place}" for place, node in enumerate(graph.nodes)}
    return re.sub(r"%(\w+)", lambda match: "%" + names.get(match[1], match[1]), graph.to_text())


# Models whose operations depend on the length: scans over chunks or steps, windows of attention, routing by values.
FIXED = {
    "bamba", "big_bird_sparse", "canine", "clip", "falcon_mamba", "funnel", "jamba", "led", "llava", "longformer",
    "mamba", "mamba2", "recurrent_gemma", "rwkv", "vilt", "zamba2",
}  # fmt: skip
FAMILIES_OF_TEXTS = ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in sorted({*FAMILIES} - {"gpt2"}))]


@pytest.mark.parametrize("name", FAMILIES_OF_TEXTS)
def test_at_a_length_it_is_the_trace_of_that_length(name: str) -> None:
    model, batch = FAMILIES[name]()
    if not isinstance(batch, dict) or "input_ids" not in batch:
        pytest.skip("reads no tokens")
    whole = batch["input_ids"].shape[1]
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    places = [(key, dim) for key, t in tensors.items() for dim in range(1, t.dim()) if t.shape[dim] == whole]
    lengths = [Length(*place, "l0") for place in places]
    if name in FIXED:
        with pytest.raises(FixedLengthError):
            traced(model, batch, *lengths)
        return
    opened = traced(model, batch, *lengths)
    assert dict(opened.graph.symbols) == {"b": len(batch["input_ids"]), "l0": whole}
    assert opened.fixed({"l0": whole - 4}) is not None
    for key, dim in places:
        batch[key] = batch[key].narrow(dim, 0, whole - 4)
    graph = normalise(normalise(opened.graph).fixed({"l0": whole - 4}))
    assert text_of(graph) == text_of(normalise(traced(model, batch).graph))


class Positions(nn.Module):
    """Positions have weights of their own, and a long text has another operation."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.ones(most))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 12:
            x = x.cos()
        return (nn.functional.dropout(x) * self.positions[: x.shape[1]]).sum() + other.sum()


PLACE = Length("x", 1, "l0")


def test_guards_say_for_which_lengths_it_holds() -> None:
    opened = traced(Positions(20), {"x": torch.ones(4, 9), "other": torch.ones(4, 9)}, PLACE)
    shapes = {node.target: node.type.shape for node in opened.graph.placeholders("input")}
    assert shapes == {"x": (symbol("b"), symbol("l0")), "other": (symbol("b"), 9)}
    assert opened.fixed({"l0": 12}) is not None and opened.fixed({"l0": 13}) is None
    fixed = opened.fixed({"l0": 7})
    assert fixed is not None and fixed.holds_for(100)
    (draw,) = [node for node in opened.graph.fixed({"l0": 7}).nodes if "samples" in dict(node.kwargs)]
    assert dict(draw.kwargs)["samples"] == (0, 7)


def test_a_table_that_ends_at_the_length_is_no_obstacle() -> None:
    assert traced(Positions(9), {"x": torch.ones(4, 9), "other": torch.ones(4)}, PLACE).graph.symbols


@pytest.mark.parametrize("batch", [4, 1])
def test_a_model_that_fixes_the_length_is_named(batch: int) -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(9, 9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sum()

    with pytest.raises(FixedLengthError):
        traced(Mixer(), {"x": torch.ones(batch, 9)}, PLACE)
    assert not traced(Mixer(), {"x": torch.ones(1, 9)}).graph.symbols


def test_what_varies_is_found() -> None:
    batch = symbol("b")
    ids, scores = TensorType((batch, 9, 9), torch.int64), TensorType((batch, 3, 9), torch.float32)
    types = {"ids": ids, "scores": scores}

    def of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        return {"ids": torch.zeros(shapes[0], dtype=torch.int64), "scores": torch.zeros(shapes[1], dtype=dtype)}

    tensors = of((5, 9, 7), (5, 4, 7))
    found = varying(types, tensors)
    assert found == (Length("ids", 2, "l0"), Length("scores", 2, "l0"), Length("scores", 1, "l1"))
    assert real_lengths(found, tensors) == {"l0": 7, "l1": 4}
    assert varying(types, of((8, 9, 9), (8, 3, 9))) == ()
    assert varying(types, of((8, 9, 9), (8, 3, 9), dtype=torch.float64)) is None
    assert varying(types, of((8, 9), (8, 3, 9))) is None
    assert varying(types, of((8, 9, 9), (8, 1, 9))) is None, "a size of one may be another operation"
    assert varying({"ids": ids}, tensors) is None


def test_primes_stand_for_sizes() -> None:
    assert prime_below({64, 13}, 17) == 11
    assert prime_below({64, 13 * 11 * 7}, 17) == 5
    assert prime_below({64}, 5) == 11, "none below"
