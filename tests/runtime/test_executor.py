"""Sections run as written, drop values early, and name the instruction that fails."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from autopar.errors import ExecutionError, GraphError
from autopar.ir.node import Value
from autopar.ir.placements import parse_placements
from autopar.ir.program import Instruction, Program, Section, TensorSlot
from autopar.runtime.comm.groups import mesh_of_one
from autopar.runtime.execute.executor import Executable, instruction_axes
from autopar.runtime.execute.section_code import compile_section
from autopar.runtime.execute.section_source import Source
from autopar.runtime.launch import run_local

CPU = torch.device("cpu")
V = Value


def section(inputs: str, instructions: list[Instruction], *outputs: Value | None) -> Section:
    return Section("forward", tuple(inputs.split()), tuple(instructions), outputs)


def run(part: Section, *inputs: torch.Tensor, **operations: object) -> list[torch.Tensor]:
    known = {name.replace("__", "."): f for name, f in operations.items()}
    return compile_section(part, known, CPU)(list(inputs))  # type: ignore[arg-type]


def test_arguments_of_every_kind() -> None:
    part = section(
        "x",
        [
            Instruction(
                "full",
                "aten.full.default",
                ((2, 3), float("-inf")),
                (("dtype", torch.float64), ("device", CPU)),
            ),
            Instruction("cat", "aten.cat.default", ((V("x"), V("full")), 0)),
            Instruction("clamp", "aten.clamp.default", (V("cat"), None, 1e30)),
            Instruction("lambda", "aten.view.default", (V("clamp"), (-1,))),
        ],
        V("lambda"),
        None,
    )
    found, nothing = run(part, torch.ones(1, 3, dtype=torch.float64))
    assert found.tolist() == [1.0] * 3 + [float("-inf")] * 6 and nothing is None


def test_several_results_and_lists() -> None:
    part = section(
        "x",
        [
            Instruction("top", "aten.topk.default", (V("x"), 2), results=2),
            Instruction("parts", "aten.split.Tensor", (V("x"), 3), results=2),
            Instruction("one", "aten.split.Tensor", (V("x"), 4), results=1),
        ],
        V("top", 1),
        V("parts", 1),
        V("one"),
    )
    index, part_1, one = run(part, torch.tensor([1.0, 4.0, 3.0, 2.0]))
    assert index.tolist() == [1, 2] and part_1.tolist() == [2.0] and one.tolist() == [1.0, 4.0, 3.0, 2.0]


def test_more_results_than_python_unpacks_before_a_starred_name() -> None:
    count = 300
    parts = Instruction("parts", "aten.unbind.int", (V("x"),), results=count)
    found = run(section("x", [parts], *(V("parts", index) for index in range(1, count))), torch.arange(count))
    assert [int(value) for value in found] == list(range(1, count))


def test_keyword_that_python_reserves() -> None:
    part = section("x", [Instruction("y", "aten.uniform.default", (V("x"),), (("from", 2.0), ("to", 2.0)))], V("y"))
    assert run(part, torch.zeros(2)).pop().tolist() == [2.0, 2.0]


def test_view_of_what_lies_otherwise() -> None:
    """A traced view may meet a shard whose memory is laid out differently."""
    part = section("x", [Instruction("y", "aten.view.default", (V("x"), (6,)))], V("y"))
    assert run(part, torch.arange(6.0).reshape(2, 3).t()).pop().tolist() == [0, 3, 1, 4, 2, 5]


def test_names_do_not_collide() -> None:
    part = section(
        "inputs float",
        [
            Instruction("forward", "aten.neg.default", (V("inputs"),)),
            Instruction("aten_neg", "aten.neg.default", (V("forward"),)),
            Instruction("x_1", "aten.topk.default", (V("aten_neg"), 1), results=2),
            Instruction("x_1_1", "aten.mul.Tensor", (V("x_1"), float("inf"))),
        ],
        V("x_1_1"),
        V("x_1", 1),
        V("float"),
    )
    value, index, same = run(part, torch.tensor([5.0, 7.0]), torch.zeros(1))
    assert value.item() == float("inf") and index.item() == 1 and same.item() == 0.0


def test_values_are_dropped_after_their_last_use() -> None:
    alive: list[int] = []
    seen: list[weakref.ref[torch.Tensor]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(sum(r() is not None for r in seen))
        made = tensor + 1
        seen.append(weakref.ref(made))
        return made

    steps = [Instruction(f"v{n + 1}", "autopar.note", (V(f"v{n}"),)) for n in range(4)]
    first = torch.zeros(2)
    gone = weakref.ref(first)
    inputs = [first]
    function = compile_section(section("v0", steps, V("v4")), {"autopar.note": note}, CPU)
    del first
    gc.collect()
    function(inputs)
    assert alive == [0, 1, 1, 1] and not inputs and gone() is None


def test_unused_inputs_and_results_are_dropped() -> None:
    part = section("x y", [Instruction("t", "aten.topk.default", (V("x"), 1), results=2)], V("t"))
    text = Source(part, {}, CPU).text
    assert "del y" in text and "_ = None" in text


def test_error_names_instruction_module_and_operands() -> None:
    bad = Instruction("mm", "aten.mm.default", (V("x"), V("x")), module="layers.3.mlp")
    with pytest.raises(ExecutionError) as caught:
        compile_section(section("x", [bad], V("mm")), {}, CPU, "rank 2")([torch.ones(2, 3)])
    text = str(caught.value)
    assert "forward on rank 2, in the instruction of module layers.3.mlp" in text
    assert "%mm = aten.mm.default(%x, %x)" in text and "%x: f32[2, 3]" in text and "RuntimeError" in text


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        (Instruction("y", "aten.no_such.default", (V("x"),)), "'aten.no_such.default' is not an operation"),
        (
            Instruction("y", "collective.shout", (V("x"),)),
            "'collective.shout' is not an operation of this runtime",
        ),
        (Instruction("y", "aten.neg.default", (V("z"),)), "%z is used before its definition"),
        (Instruction("x", "aten.neg.default", (V("x"),)), "%x is defined twice"),
    ],
)
def test_bad_programs(instruction: Instruction, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        run(section("x", [instruction], V(instruction.name)), torch.ones(1))


def test_devices_follow_the_mesh() -> None:
    step = Instruction("y", "aten.zeros.default", ((2,),), (("device", torch.device("cuda:3")),))
    source = Source(section("", [step], V("y")), {}, torch.device("cuda:1"))
    assert torch.device("cuda:1") in source.namespace.values()


def tiny_program(coordinate: tuple[int, ...] = (0,)) -> Program:
    slot = TensorSlot("w", "param", "weight", (4,), parse_placements("R"))
    twice = Instruction("y", "aten.mul.Tensor", (V("w"), V("c")))
    handle = Instruction("h", "collective.all_reduce", (V("y"), (0,), "sum"))
    wait = Instruction("r", "collective.wait", (V("h"),))
    constant = TensorSlot("c", "constant", "two", (), parse_placements("R"))
    return Program(
        (1,), coordinate, (slot,), (slot, constant),
        (TensorSlot("r", "output", "0", (4,), parse_placements("R")),), (), (),
        Section("refresh", ("w",), (), (V("w"),)),
        Section("forward", ("w", "c"), (twice, handle, wait), (V("r"), V("y"))),
        Section("backward", ("y",), (Instruction("z", "aten.neg.default", (V("y"),)),), (V("z"), None)),
        {"two": torch.tensor(2.0)},
    )  # fmt: skip


def test_executable_on_one_device() -> None:
    def work(rank: int, world: int) -> None:
        program = tiny_program()
        assert instruction_axes((program.refresh, program.forward, program.backward)) == {(0,)}
        executable = Executable(program, mesh_of_one())
        weight = torch.arange(4.0, requires_grad=True)
        (working,) = executable.refresh([weight.detach()])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (result,), saved = executable.forward([working, executable.constants["two"]])
        assert result.tolist() == [0, 2, 4, 6] and len(saved) == 1
        assert [g if g is None else g.tolist() for g in executable.backward(saved, [])] == [
            [0, -2, -4, -6],
            None,
        ]
        assert saved == []

    run_local(work, 1, timeout=30, backend=None)


def test_program_of_another_rank_is_refused() -> None:
    def work(rank: int, world: int) -> None:
        Executable(tiny_program((1,)), mesh_of_one())

    with pytest.raises(ExecutionError, match=r"for coordinate \(1,\) .* but this rank is at \(0,\)"):
        run_local(work, 1, timeout=30, backend=None)
