"""Uses of what libraries keep to themselves, read from the source.

Private is a name that begins with one underscore, and the undocumented modules listed here. Names of operations
(``torch.ops.aten._softmax``) are none: the dispatcher's names are fixed by their schemas.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from .sources import ROOT, module_files

LIBRARIES = ("torch", "functorch", "ortools", "transformers")
# Modules without an underscore that no documentation describes.
UNDOCUMENTED = ("functorch", "torch.fx.experimental", "torch.fx.traceback", "ortools.math_opt.core")
# Where private parts may be used, and why there.
HOMES = {
    "autopar/torch_internals/": "the home of what tracing and planning need",
    "runtime/torch_internals/": "the home of what the runtime needs",
    "autopar/solver/highs.py": "ortools.math_opt.core solves a protobuf; the public function builds one from objects",
}
_BY_NAME = ("getattr", "hasattr", "setattr", "delattr", "object", "attrgetter", "callback")  # patch.object, too.
_PRIVATE = re.compile(r"_[a-zA-Z]\w*")


def is_private(name: str) -> bool:
    return _PRIVATE.fullmatch(name) is not None


def uses_of_private_parts(root: Path = ROOT) -> list[str]:
    """``file:line: what`` of every use outside of :data:`HOMES`, in the four folders."""
    trees = {str(path.relative_to(root)): ast.parse(path.read_text()) for path in module_files(root).values()}
    own = {file: members(tree) for file, tree in trees.items()}
    inherited = set().union(*own.values())
    homes = tuple(HOMES)
    reached = {name for file, tree in trees.items() if file.startswith(homes) for name in reached_for(tree)}
    return [
        f"{file}:{line}: {what}"
        for file, tree in trees.items()
        if not file.startswith(homes)
        for line, what in sorted(_File(tree, own[file], inherited, reached - inherited).uses())
    ]


def reached_for(tree: ast.Module) -> Iterator[str]:
    """The private names in a home, as attributes or in quotes."""
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else _text(node)
        if is_private(name):
            yield name


def members(tree: ast.Module) -> set[str]:
    """Names that the classes of a file define: methods, fields, and what a method assigns to ``self``."""
    return {name for kind in ast.walk(tree) if isinstance(kind, ast.ClassDef) for name in _members_of(kind)}


def _members_of(kind: ast.ClassDef) -> Iterator[str]:
    for node in kind.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        yield from (target.id for target in _targets(node) if isinstance(target, ast.Name))
    for node in ast.walk(kind):
        yield from (t.attr for t in _targets(node) if isinstance(t, ast.Attribute) and _is_self(t.value))


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        yield node.target


def _is_self(node: ast.expr) -> bool:
    is_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return is_super or (isinstance(node, ast.Name) and node.id in ("self", "cls"))


class _File:
    """One file: its classes define ``own``, and any class of autopar ``inherited``, which ``self`` may have;
    ``reached`` are those that homes reach for, which are not to be named in quotes either."""

    def __init__(self, tree: ast.Module, own: set[str], inherited: set[str], reached: set[str]) -> None:
        self.tree, self.own, self.inherited, self.reached = tree, own, inherited, reached
        self.modules = dict(_imported(tree))

    def uses(self) -> Iterator[tuple[int, str]]:
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield from ((node.lineno, f"imports {name}") for name in _names(node) if _is_private_part(name))
            elif isinstance(node, ast.Attribute) and is_private(node.attr) and not self._may_use(node):
                yield node.lineno, ast.unparse(node)
            elif isinstance(node, ast.Call):
                yield from ((node.lineno, what) for what in self._named_in(node))
            elif isinstance(node, ast.Constant) and _text(node) in self.reached:
                yield node.lineno, repr(node.value)

    def _named_in(self, call: ast.Call) -> Iterator[str]:
        """Private names as arguments: in quotes (``getattr(x, "_name")``), or keywords (``DeviceMesh(_rank=0)``)."""
        function = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        names = [_text(arg) for arg in call.args] if function in _BY_NAME else []
        yield from (f"{function}({name!r})" for name in names if is_private(name) and name not in self.inherited)
        keys = [key.arg for key in call.keywords if key.arg and is_private(key.arg)]
        yield from (f"{function}({key}=...)" for key in keys if key not in self.inherited)

    def _may_use(self, node: ast.Attribute) -> bool:
        if _is_self(node.value):
            return node.attr in self.inherited
        path = self._path(node.value)
        if path.startswith("torch.ops."):
            return True
        is_other_library = path != "" and path.partition(".")[0] not in LIBRARIES
        return is_other_library or (path == "" and node.attr in self.own)

    def _path(self, node: ast.expr) -> str:
        """The dotted name of what is imported; "" for anything else."""
        if isinstance(node, ast.Attribute):
            inner = self._path(node.value)
            return f"{inner}.{node.attr}" if inner else ""
        return self.modules.get(node.id, "") if isinstance(node, ast.Name) else ""


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names of modules that the file imports -> what they are; of ``from x import y``, only what begins lower-case,
    as modules do. ``aten`` is what this code calls ``torch.ops.aten``."""
    yield "aten", "torch.ops.aten"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (
                    (alias.asname or alias.name.partition(".")[0]),
                    (alias.name if alias.asname else alias.name.partition(".")[0]),
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names] if not node.level else []


def _is_private_part(name: str) -> bool:
    undocumented = any(f"{name}.".startswith(f"{module}.") for module in UNDOCUMENTED)
    return undocumented or (name.partition(".")[0] in LIBRARIES and any(map(is_private, name.split("."))))


def _text(node: ast.AST) -> str:
    """What a literal says, of an f-string its beginning."""
    first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
