"""Modules that recipes name by globs of their paths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.planner.roles.expert_blocks import FORWARD
from benchmarks.emulator.sections.shortened_model import Depth, inside

from .recipe import PATTERNS, Recipe


def matches(module: str, patterns: Iterable[str]) -> bool:
    """Whether a module's path matches one of the globs of a recipe's field."""
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def matches_whole(module: str, patterns: tuple[str, ...]) -> bool:
    """Whether the path of a module, or of one that contains it, matches one of the globs of a recipe's field.

    >>> matches_whole("layers.0.mlp.up", ("*.mlp",)), matches_whole("layers.0.mlp_norm", ("*.mlp",))
    (True, False)
    """
    ends = [end for end, letter in enumerate(module) if letter == "."]
    return any(matches(module[:end], patterns) for end in (0, *ends, len(module)))


def launches_as_graph(module: str, recipe: Recipe) -> bool:
    """Whether the host launches the operations of a module as one CUDA graph."""
    return matches(module, recipe.cuda_graphs)


def check_represented(modules: Sequence[str], depth: Depth, recipe: Recipe) -> None:
    """Raises :class:`OptionsError` for a field that names modules in some of the layers that share one price, but not
    in all of them: a layer and those it represents. ``modules``: the paths of all modules."""
    for name in PATTERNS:
        patterns = getattr(recipe, name)
        named = [path for path in modules if matches(path, patterns)]
        for path, kinds in depth.kinds.items() if named else ():
            parts = _parts(named, path)
            for layer, kind in kinds.items():
                own, representative = (parts.get(name, set()) for name in (layer, kind))
                if own != representative:
                    part = min(own ^ representative)
                    named_in, missing_in = (layer, kind) if part in own else (kind, layer)
                    count = list(kinds.values()).count(kind)
                    raise OptionsError(
                        f"Recipe({name}={patterns!r}) names {inside(path, named_in + part)} and not "
                        f"{inside(path, missing_in + part)}, but they share one price, as do all "
                        f"{count} layers equal to {inside(path, kind)}; name it in all of them, such as by "
                        f"{inside(path, '*' + part)!r}, or in none"
                    )


def check_recomputed(graph: Graph, recipe: Recipe) -> None:
    """Raises :class:`OptionsError` if a block of experts would be recomputed separately."""
    for node in graph.nodes:
        if node.op == FORWARD and matches_whole(node.module, recipe.recomputed):
            raise OptionsError(
                f"Recipe(recomputed={recipe.recomputed!r}) names {node.module or node.name}, whose experts are priced "
                'separately, and would send their rows once more; name other modules, or take recompute="full"'
            )


def _parts(paths: Iterable[str], layers: str) -> dict[str, set[str]]:
    """For each element of the list at ``layers``, by name: the ends of its own path and of its parts' paths among
    ``paths``, relative to the element."""
    below, parts = inside(layers, ""), dict[str, set[str]]()
    for path in paths:
        if path.startswith(below):
            name, dot, part = path.removeprefix(below).partition(".")
            parts.setdefault(name, set()).add(dot + part)
    return parts
