"""Programs and their text form."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from autopar.errors import GraphError
from autopar.ir.node import Value
from autopar.ir.placements import parse_placement
from autopar.ir.program import Instruction, Program, Section, TensorSlot

TEXT = """# rank at (0, 1) of mesh (2, 2)
parameter "w" = param "layers.0.weight": f32[4, 8] at (S(0),R)
placeholder "w" = param "layers.0.weight": f32[4, 8] at (R,S(1/2))
placeholder "x" = input "x": i64[] at (R,P(sum))
result "0" = output "0": f32[2] at (R,R)
tangent "one" = tangent "0": f32[] at (R,R)
gradient "w" = gradient "layers.0.weight": f32[4, 8] at (S(0),R)
refresh():
  return
forward(%w, %x):
  %p, %p.1 = aten.split.Tensor(%w, [2, 2], dim=1)  @layers.0
  %y = aten.mul.Tensor(%p.1, -0.5, dtype=torch.float32, how="a b", flag=True, none=None)
  return %y, none, %p.1
backward(%p, %one):
  %g = collective.all_reduce_bucket([%p, %one], axes=[0, 1], op="sum")
  %g_wait, %g_wait.1 = collective.wait(%g)
  return %g_wait.1
"""


def test_operands_are_found_once_and_anew_for_other_arguments() -> None:
    x, y = Value("x"), Value("y", 1)
    step = Instruction("z", "aten.cat.default", ((x, (y, x)), 1), (("like", y),))
    assert step.operands == (x, y, x, y) and step.operands is step.operands
    assert replace(step, args=(y,)).operands == (y, y)
    assert step.with_values({x: y}).operands == (y, y, y, y)
    again = pickle.loads(pickle.dumps(step))
    assert again == step == Instruction("z", "aten.cat.default", ((x, (y, x)), 1), (("like", y),))
    assert again.operands == step.operands and repr(again) == repr(step)


def test_text_round_trips() -> None:
    program = Program.from_text(TEXT)
    assert program.to_text() == TEXT
    assert Program.from_text(program.to_text()) == program
    assert program.placeholders[0].shape == (4, 8) and program.parameters[0].target == "layers.0.weight"
    assert program.forward.outputs == (Value("y"), None, Value("p", 1))
    assert program.forward.instructions[0].results == 2 and program.forward.instructions[0].module == "layers.0"


def test_what_is_shown_to_people_is_read_too() -> None:
    program = Program.from_text(TEXT)
    shown = Program.from_text(str(program))
    assert str(shown) == str(program) and shown.placeholders == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("forward():\n  return\n", "a program starts with a line such as"),
        ("# rank at (0,) of mesh (2,)\nforward():\n  return\n", "found: forward"),
        ("# rank at (0,) of mesh (2,)\n", "found: none"),
        (TEXT.replace("  return\n", ""), "section refresh does not end with a return"),
        (TEXT.replace("at (R,P(sum))", "on (R)"), 'cannot read the line \'placeholder "x"'),
        (TEXT.replace("%y = aten.mul", "y = aten.mul"), "cannot read the line 'y = aten.mul"),
        (TEXT.replace("return %y", "return y"), "'y' is not a value"),
        (TEXT.replace('tangent "one"', 'cotangent "one"'), "a program has no 'cotangent', only parameter"),
        (TEXT.replace("at (R,R)\ngradient", "at (R,R) over 0>1\ngradient"), "not with 'over 0>1'"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(GraphError, match=message.replace("(", r"\(")):
        Program.from_text(text)


NAMES = st.text("ab_1", min_size=1, max_size=4).map("v".__add__)
VALUES = st.builds(Value, NAMES, st.integers(0, 3))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text("abc .\"'\\", max_size=5),
    VALUES,
    st.sampled_from([torch.float32, torch.bfloat16, torch.strided, torch.contiguous_format, torch.device("cpu")]),
)
ARGUMENTS: st.SearchStrategy[Any] = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3).map(tuple))
MODULES = st.sampled_from(["", "layers.0.up", "h"])
KEYWORDS = st.dictionaries(st.sampled_from(["dim", "axes", "op"]), ARGUMENTS, max_size=2)
INSTRUCTIONS = st.builds(
    Instruction,
    NAMES,
    st.sampled_from(["aten.mm.default", "collective.wait", "autopar.take"]),
    st.lists(ARGUMENTS, max_size=3).map(tuple),
    KEYWORDS.map(lambda found: tuple(found.items())),
    st.integers(1, 3),
    MODULES,
)


def section(name: str) -> st.SearchStrategy[Section]:
    listed = st.lists(NAMES, max_size=3).map(tuple)
    outputs = st.lists(st.none() | VALUES, max_size=3).map(tuple)
    return st.builds(Section, st.just(name), listed, st.lists(INSTRUCTIONS, max_size=4).map(tuple), outputs)


PLACEMENTS = st.lists(st.sampled_from(["R", "S(0)", "S(1/4)", "P(sum)", "P(max)"]).map(parse_placement), max_size=3)
SLOTS = st.builds(
    TensorSlot,
    st.text("a_.0\"'\\", max_size=5),
    st.sampled_from(["param", "input", "output", "gradient"]),
    st.text("a_.0\"'\\", max_size=5),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    PLACEMENTS.map(tuple),
    st.sampled_from([torch.float32, torch.int64, torch.bool]),
)
MESHES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
GROUP = st.lists(SLOTS, max_size=2).map(tuple)
SECTIONS = (section("refresh"), section("forward"), section("backward"))


@settings(max_examples=30, phases=[Phase.generate])
@given(st.builds(Program, MESHES, MESHES, GROUP, GROUP, GROUP, GROUP, GROUP, *SECTIONS))
def test_any_program_round_trips(program: Program) -> None:
    assert Program.from_text(program.to_text()) == program
