"""Checks that only raise for bad values: ``if bad.any(): raise ...`` and ``assert good.all()``. A graph cannot raise.
It contains the code that runs if no value is bad, and the plan says which checks it leaves out.
"""

from __future__ import annotations

import ast
import dis
from types import FrameType

from .branches import SelectionError, path_to, user_frame

Place = tuple[int, int]


def truth_without_raising() -> tuple[bool, str] | None:
    """The value of the condition that the model's code evaluates now with which the code does not raise, and
    ``file:line`` of the check; None if the condition decides anything else."""
    frame = user_frame()
    try:
        path = path_to(frame)
    except SelectionError:  # Its source cannot be read.
        return None
    jump = _asking(frame, path[-1])
    statement = next((node for node in reversed(path) if isinstance(node, ast.stmt)), None)
    raising = None if statement is None else _raising(statement)
    if jump is None or statement is None or raising is None:
        return None
    jumps = not _is_target_in(frame, jump.argval, raising)
    return ("IF_TRUE" in jump.opname) == jumps, f"{frame.f_code.co_filename}:{statement.lineno}"


def _asking(frame: FrameType, node: ast.AST) -> dis.Instruction | None:
    """The jump that depends on the condition, also if the condition is read by ``t.item()`` or ``bool(t)``."""
    instructions = (i for i in dis.get_instructions(frame.f_code) if i.offset >= frame.f_lasti)
    instruction = next(instructions)
    if instruction.opname.startswith("CALL") and _takes_value(node):
        instruction = next(instructions)
    return instruction if "JUMP" in instruction.opname and "IF_" in instruction.opname else None


def _takes_value(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return (isinstance(called, ast.Attribute) and called.attr == "item") or (
        isinstance(called, ast.Name) and called.id == "bool"
    )


def _raising(statement: ast.stmt) -> tuple[Place, Place] | None:
    """The first and the last position of the code of a check that raises; (0, 0) twice for an ``assert``."""
    if isinstance(statement, ast.Assert):
        return (0, 0), (0, 0)
    if not isinstance(statement, ast.If):
        return None
    bodies = [body for body in (statement.body, statement.orelse) if body and isinstance(body[-1], ast.Raise)]
    if len(bodies) != 1:
        return None
    first, last = bodies[0][0], bodies[0][-1]
    return (first.lineno, first.col_offset), (last.end_lineno or last.lineno, last.end_col_offset or 0)


def _is_target_in(frame: FrameType, offset: int, raising: tuple[Place, Place]) -> bool:
    target = next(i for i in dis.get_instructions(frame.f_code) if i.offset == offset)
    where = target.positions
    if target.opname == "LOAD_ASSERTION_ERROR" or where is None or where.lineno is None or where.col_offset is None:
        return target.opname == "LOAD_ASSERTION_ERROR"
    return raising[0] <= (where.lineno, where.col_offset) <= raising[1]
