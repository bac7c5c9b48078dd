"""Code that a model skips if a selection is empty: ``if mask.any():``, ``if not n: continue``, a loop over the experts
that were hit. A graph has no branches, so it contains the code as if it always ran. That is correct if the code changes
nothing for an empty selection, which is proven from the source and from what runs.

From the source: the skipped statements only bind names that nothing else reads, and write to tensors. From what runs:
while one of these statements runs, tensors are written only through selections that are empty whenever the condition is
false (:meth:`Regions.check_write`). Anything else is an error, unless the ``if`` is left out.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType

import torch

from autopar.content.code_origin import own_folders

from .mask_facts import Key

_PASSED_OVER = tuple(folder + os.sep for folder in (os.path.dirname(torch.__file__), *own_folders().values()))
_HINT = "; leave the condition out, for a selection without rows adds nothing"


class SelectionError(Exception):
    """The model does something with selected rows that depends on which rows are selected."""


@dataclass(frozen=True)
class Region:
    """Lines ``first`` to ``last`` of the function that runs in ``frame``, which run only if ``condition`` is not
    empty."""

    frame: FrameType
    first: int
    last: int
    condition: Key


def user_frame() -> FrameType:
    """The innermost frame that is neither torch's nor autopar's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        frame = frame.f_back
    assert frame is not None
    return frame


class Regions:
    """The regions that are running."""

    def __init__(self) -> None:
        self._regions: dict[tuple[int, int], Region] = {}

    def enter_branch(self, condition: Key, truth: bool) -> bool:
        """Records the code that is skipped if the selection has no rows. Returns ``truth``, the value of the condition
        if it has some."""
        frame = user_frame()
        self._add(frame, _skipped(frame, truth), condition)
        return truth

    def loop(self, conditions: list[Key], items: Iterator[object]) -> Iterator[object]:
        """Yields ``items`` to the ``for`` statement that iterates, each under a condition of its own."""
        frame = user_frame()
        body = _loop_body(frame)
        for condition, item in zip(conditions, items, strict=True):
            self._add(frame, body, condition)
            yield item

    def _add(self, frame: FrameType, body: list[ast.stmt], condition: Key) -> None:
        first, last = body[0].lineno, max(statement.end_lineno or statement.lineno for statement in body)
        self._regions[id(frame), first] = Region(frame, first, last, condition)

    @property
    def running(self) -> list[Region]:
        """The regions whose code is being executed."""
        if not self._regions:
            return []
        frames, frame = {}, sys._getframe(1)
        while frame is not None:
            frames[id(frame)] = frame
            frame = frame.f_back  # type: ignore[assignment]
        self._regions = {key: region for key, region in self._regions.items() if key[0] in frames}
        return [
            region
            for region in self._regions.values()
            if frames[id(region.frame)] is region.frame and region.first <= region.frame.f_lineno <= region.last
        ]

    def check_write(self, within: frozenset[Key], operation: str) -> None:
        """Raises :class:`SelectionError` if a write may change something although its code is skipped. The write goes
        through a selection that is empty if one of ``within`` is."""
        for region in self.running:
            if region.condition not in within:
                raise SelectionError(
                    f"{operation} runs only if a selection has rows (from line {region.first} on), and it is not "
                    f"proven that it changes nothing without them{_HINT}"
                )


@lru_cache(maxsize=64)
def _parsed(filename: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError as error:
        raise SelectionError(f"the source of this condition cannot be read ({error}){_HINT}") from None


def path_to(frame: FrameType) -> list[ast.AST]:
    """The syntax nodes that contain what ``frame`` runs now, outermost first, from its function on."""
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    line, end_line, column, end_column = positions
    if line is None or end_line is None or column is None or end_column is None:
        raise SelectionError(f"the position of this condition in the source is unknown{_HINT}")

    def holds(node: ast.AST) -> bool:
        if not isinstance(node, (ast.stmt, ast.expr)):
            return isinstance(node, ast.Module)
        begin, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
        return begin <= (line, column) and (end_line, end_column) <= end

    path: list[ast.AST] = [_parsed(frame.f_code.co_filename)]
    while inner := next((child for child in ast.iter_child_nodes(path[-1]) if holds(child)), None):
        path.append(inner)
    starts = [i for i, node in enumerate(path) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    if not starts:
        raise SelectionError(f"the source of this condition was not found{_HINT}")
    return path[starts[-1] :]


def _skipped(frame: FrameType, truth: bool) -> list[ast.stmt]:
    """The statements that run only if the condition that is evaluated now is ``truth``."""
    path = path_to(frame)
    place, statement = next(
        ((i, node) for i, node in reversed(list(enumerate(path))) if isinstance(node, ast.stmt)), (0, None)
    )
    if not isinstance(statement, ast.If) or not _is_plain(statement.test, path[place + 1 :]):
        raise SelectionError(
            "whether a selection has rows decides here what runs, and only an `if` statement with this condition "
            f"alone can be followed{_HINT}"
        )
    holds = truth != isinstance(statement.test, ast.UnaryOp)
    if holds and not statement.orelse and not any(isinstance(node, ast.Continue) for node in ast.walk(statement)):
        return _harmless(statement.body, path[0], frame)
    if not holds and not statement.orelse and len(statement.body) == 1 and isinstance(statement.body[0], ast.Continue):
        loop = path[place - 1]
        if isinstance(loop, (ast.For, ast.While)) and statement in loop.body[:-1]:
            return _harmless(loop.body[loop.body.index(statement) + 1 :], path[0], frame)
    raise SelectionError(f"something else runs here if a selection has no rows{_HINT}")


def _is_plain(test: ast.expr, path: list[ast.AST]) -> bool:
    """Whether the test is just the condition that is evaluated, or its negation."""
    inner = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else test
    compound = isinstance(inner, (ast.BoolOp, ast.IfExp, ast.UnaryOp)) or len(getattr(inner, "comparators", ())) > 1
    # The jump has the position of the test, or of the whole statement.
    return not compound and path in ([], [test], [test, inner])


def _loop_body(frame: FrameType) -> list[ast.stmt]:
    path = path_to(frame)
    statements = [node for node in path if isinstance(node, ast.stmt)]
    loop = statements[-1]
    if not isinstance(loop, ast.For) or loop.orelse:
        raise SelectionError("selected rows are iterated over here, but not by a `for` statement")
    return _harmless(loop.body, path[0], frame, loop.target)


def _harmless(
    body: list[ast.stmt], function: ast.AST, frame: FrameType, target: ast.expr | None = None
) -> list[ast.stmt]:
    """Returns ``body`` if it has no effects but writes to tensors. Raises :class:`SelectionError`."""
    for statement in (node for part in body for node in ast.walk(part)):
        problem = _problem(statement)
        if problem:
            raise SelectionError(
                f"{problem} in line {statement.lineno}, which runs only if a selection has rows{_HINT}"  # type: ignore[attr-defined]
            )
    parts: list[ast.AST] = [*body, *([target] if target else [])]
    bound = {name for part in parts for name in _bound_in(part)}
    inside = {id(node) for part in parts for node in ast.walk(part)}
    for node in ast.walk(function):
        if (
            id(node) not in inside
            and isinstance(node, ast.Name)
            and node.id in bound
            and isinstance(node.ctx, ast.Load)
        ):
            raise SelectionError(
                f"{node.id!r} is bound in lines that run only if a selection has rows, and read in line "
                f"{node.lineno}{_HINT}"
            )
    _check_bases(body, bound, frame)
    carried = _read_before_bound(
        body, bound, {n.id for n in ast.walk(target) if isinstance(n, ast.Name)} if target else set()
    )
    if carried:
        raise SelectionError(
            f"{carried!r} is read before it is bound, in lines that run only if a selection has rows{_HINT}"
        )
    return body


def _bound_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}


def _check_bases(body: list[ast.stmt], bound: set[str], frame: FrameType) -> None:
    """Raises :class:`SelectionError` unless everything that ``body`` writes to by index or by method is a tensor, whose
    writes the trace sees."""
    for node in (node for part in body for node in ast.walk(part)):
        base: ast.expr | None = None
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            base = node.value
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            assert isinstance(node.value.func, ast.Attribute)
            base = node.value.func.value
            if isinstance(base, ast.Name) and base.id in bound:
                continue
        if base is None:
            continue
        if not isinstance(base, ast.Name) or not isinstance(frame.f_locals.get(base.id), torch.Tensor):
            raise SelectionError(
                f"line {base.lineno} runs only if a selection has rows, and writes to what is not known to be a tensor"
                f"{_HINT}"
            )


def _read_before_bound(body: list[ast.stmt], bound: set[str], assigned: set[str]) -> str:
    """A name whose value ``body`` may take from its previous run, or from outside; "" if there is none."""
    for statement in body:
        reads = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            reads.add(statement.target.id)
        early = (reads & bound) - assigned - _inner_targets(statement)
        if early:
            return sorted(early)[0]
        assigned |= _bound_in(statement) if isinstance(statement, ast.Assign) else set()
    return ""


def _inner_targets(statement: ast.stmt) -> set[str]:
    """The names that loops inside a statement bind."""
    loops = (n for n in ast.walk(statement) if isinstance(n, (ast.For, ast.comprehension)))
    return {n.id for loop in loops for n in ast.walk(loop.target) if isinstance(n, ast.Name)}


_CHECKS: tuple[tuple[Callable[[ast.AST], bool], str], ...] = (
    (
        lambda n: isinstance(n, (ast.Return, ast.Break, ast.Raise, ast.Yield, ast.YieldFrom, ast.Await)),
        "control leaves",
    ),
    (lambda n: isinstance(n, (ast.Global, ast.Nonlocal, ast.Delete, ast.Import, ast.ImportFrom)), "a scope changes"),
    (lambda n: isinstance(n, (ast.Try, ast.With, ast.FunctionDef, ast.Lambda, ast.ClassDef)), "too much happens"),
    (lambda n: isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load), "an attribute is set"),
    (lambda n: isinstance(n, ast.NamedExpr), "a name is bound within an expression"),
    (lambda n: isinstance(n, ast.Expr) and not _is_write(n.value), "something is called for its effect"),
)


def _problem(node: ast.AST) -> str:
    return next((problem for test, problem in _CHECKS if test(node)), "")


def _is_write(value: ast.expr) -> bool:
    """Whether a call's value is a constant, or a method such as ``index_add_``, whose effect the trace sees when it
    runs."""
    method = value.func if isinstance(value, ast.Call) else None
    return isinstance(value, ast.Constant) or (isinstance(method, ast.Attribute) and method.attr.endswith("_"))
