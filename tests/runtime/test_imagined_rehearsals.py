"""A rehearsal on imagined tensors finds what one on tensors does: every byte, at every point, of every tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from autopar.ir.node import Value
from autopar.ir.program import Instruction, Program, Section, TensorSlot
from autopar.ops.masked import LOCAL_OPS
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.step_graphs import step_graph
from autopar.planner.steps.step_program import step_program
from autopar.planner.timings import Timings
from autopar.runtime.rehearse import rehearsal
from autopar.runtime.rehearse.imagined_memory import ImaginedMeter
from autopar.runtime.rehearse.rehearsal import META, Footprint, ImaginedGroups, rehearse, without_data
from autopar.runtime.rehearse.remembered_instructions import RememberedInstructions, UnimaginableError
from autopar.runtime.rehearse.storage_meter import StorageMeter
from tests.helpers.marks import slow_but
from tests.helpers.models import Case, gpt2, llama
from tests.helpers.planning import requested, setting
from tests.zoo.check import random_assignment

NAMES = ["gpt2", "llama", "bert", "resnet", "stack"]


def footprint(program: Program, backend: str, meter: StorageMeter | ImaginedMeter) -> Footprint:
    groups = ImaginedGroups(program.mesh, program.coordinate, backend)
    return rehearsal._rehearse_whole(without_data(program), groups, meter)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("name", slow_but(["stack"], NAMES))
def test_any_program_holds_as_much(name: str, backend: str) -> None:
    for mesh in ((3,), (2, 2)):
        found = setting(requested(name, mesh, cluster="local"))
        for seed in range(2):
            program = found.program(random_assignment(found.graph, mesh, seed))
            expected = footprint(program, backend, StorageMeter())
            assert footprint(program, backend, ImaginedMeter()) == expected
            assert expected.peak > 0


@pytest.mark.parametrize("make", slow_but([gpt2], [gpt2, llama]))
def test_layers_run_no_more_instructions(make: Callable[[int], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    runs, recorded = Counter[int](), RememberedInstructions._recorded

    def counted(self: RememberedInstructions, instruction: Instruction, *args: Any) -> Any:
        runs[layers] += 1
        return recorded(self, instruction, *args)

    monkeypatch.setattr(RememberedInstructions, "_recorded", counted)
    for layers in (4, 8):
        request = requested(partial(make, layers), (2,))
        graph = step_graph(request.graph, request.loss, request.batch)
        placed = solve_mesh(request, graph, Timings())[0].step.placed
        runs.clear() if layers == 4 else runs.pop(8, None)
        program = step_program(placed.graph, placed.assignment, placed.prices, placed.prices.fullest)
        assert footprint(program, "nccl", ImaginedMeter()) == footprint(program, "nccl", StorageMeter())
    assert 0 < runs[8] <= 1.1 * runs[4]


def one_section(*instructions: Instruction, results: int = 1) -> Program:
    """A program of ``instructions`` on %x, which returns the last ones' results."""
    slot = TensorSlot("x", "input", "x", (4, 4), ())
    outputs = tuple(Value(step.name) for step in instructions[-results:])
    returned = tuple(TensorSlot(v.node, "output", str(i), (4, 4), ()) for i, v in enumerate(outputs))
    forward = Section("forward", ("x",), instructions, outputs)
    empty = Section("refresh", (), (), ()), Section("backward", (), (), ())
    return Program((), (), (), (slot,), returned, (), (), empty[0], forward, empty[1])


def test_views_share_memory_and_results_that_nobody_reads_are_dropped() -> None:
    x = Value("x")
    program = one_section(
        Instruction("a", "aten.exp.default", (x,)),
        Instruction("unread", "aten.exp.default", (x,)),
        Instruction("v", "aten.t.default", (Value("a"),)),
        Instruction("twice", "aten.add.Tensor", (Value("v"), Value("v"))),
        Instruction("r", "aten.relu.default", (Value("v"),)),
        results=2,
    )
    assert footprint(program, "nccl", ImaginedMeter()) == footprint(program, "nccl", StorageMeter())


def test_what_cannot_be_imagined_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []

    def keeps(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.exp())
        return tensor.exp()

    monkeypatch.setitem(LOCAL_OPS, "autopar.keeps", keeps)
    program = one_section(Instruction("a", "autopar.keeps", (Value("x"),)))
    with pytest.raises(UnimaginableError, match="keeps memory"):
        footprint(program, "nccl", ImaginedMeter())
    assert kept[0].device == META
    assert rehearse(program).peak > 0
