"""Reductions go on at places of the schedule, and give what the section gives in one go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.errors import ExecutionError
from autopar.ir.node import Value
from autopar.ir.program import Instruction, Section
from autopar.runtime.comm.collectives import Collectives, Handle
from autopar.runtime.comm.groups import mesh_groups, mesh_of_one
from autopar.runtime.execute.gradient_reducer import Reducer

V = Value


def section(count: int) -> Section:
    """As many reductions as tensors, at most two on their way at once."""
    starts = [Instruction(f"h{k}", "collective.all_reduce", (V(f"x{k}"), (0,), "sum")) for k in range(count)]
    waits = [Instruction(f"w{k}", "collective.wait", (V(f"h{k}"),)) for k in range(count)]
    listed = [*starts[:2], *(i for pair in zip(waits, starts[2:], strict=False) for i in pair)]
    listed += waits[max(count - 2, 0) :]
    return Section(
        "reduce", tuple(f"x{k}" for k in range(count)), tuple(listed), tuple(V(f"w{k}") for k in range(count))
    )


@pytest.mark.parametrize(("count", "computations"), [(4, 2), (2, 5), (5, 0), (1, 3), (0, 2)])
def test_it_goes_on_at_fixed_places(count: int, computations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def all_reduce(self: Collectives, tensor: torch.Tensor, axes: Any, op: str) -> Handle:
        events.append("starts")
        return Handle(lambda: events.append("waits") or tensor + 1)  # type: ignore[func-returns-value]

    monkeypatch.setattr(Collectives, "all_reduce", all_reduce)
    reducer = Reducer(section(count), mesh_groups(mesh_of_one("cpu")), "here")
    raw = [torch.full((2,), float(k)) for k in range(count)]
    reduction = reducer.begin(raw, computations)
    assert not raw, "the section holds them alone"
    assert events == ["starts"] * min(count, 2)
    for _ in range(computations):
        reduction.before_computation()
        events.append("computes")
    found = reduction.finish()
    assert [float(one[0]) for one in found] == [k + 1.0 for k in range(count)]
    if computations and count:
        assert events.index("computes") < events.index("waits")
    assert events.count("waits") == events.count("starts") == count
    spread = [events[:at].count("waits") for at, event in enumerate(events) if event == "computes"]
    assert spread == [count * k // computations for k in range(computations)]


def test_an_error_names_the_instruction() -> None:
    bad = Section("reduce", ("x",), (Instruction("y", "aten.mm.default", (V("x"), V("x"))),), (V("y"),))
    reducer = Reducer(bad, mesh_groups(mesh_of_one("cpu")), "the rank at (0,)")
    with pytest.raises(ExecutionError, match=r"(?s)reduce on the rank at \(0,\).*%y = aten.mm.default"):
        reducer.begin([torch.ones(2, 3)], 0)
