"""Chunks that end between any operations, or where ends count as layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from typing import Any

from autopar.errors import OptionsError
from benchmarks.emulator.sections.section import Chunk, Seconds, Section, Sections
from benchmarks.emulator.step.chunks import cut_into_chunks, on_ranks

from .recipe import Recipe

# Seconds of a section that chunks of equal length have equally much of.
Work = Callable[[Section], float]


def recipe_chunks(sections: Sections, recipe: Recipe, work: Work) -> list[Chunk]:
    """The sections of each chunk. Raises :class:`OptionsError` if a chunk would be empty, or if the model has fewer
    layers than are offloaded."""
    if recipe.offload_layers > len(sections.priced_as):
        count = len(sections.priced_as)
        raise OptionsError(
            f"Recipe(offload_layers={recipe.offload_layers}): the model has {count} layers; take {count}"
        )
    if recipe.cuts == "operations":
        return on_ranks(sections, _between_operations(sections, recipe.chunks, work), recipe)
    return cut_into_chunks(sections, recipe, recipe.embedding_as_layers, recipe.head_as_layers)


def _between_operations(sections: Sections, count: int, work: Work) -> list[list[Section]]:
    """Chunks of equal work: a section that crosses a cut is divided there in proportion."""
    every = sections.every
    ends = list(accumulate(map(work, every)))
    cuts = [ends[-1] * i / count for i in range(count + 1)]
    spans = list(zip(every, [0.0, *ends], ends, strict=False))
    return [list(_within(spans, start, end)) for start, end in pairwise(cuts)]


def _within(spans: list[tuple[Section, float, float]], start: float, end: float) -> Iterator[Section]:
    """The sections, or parts of them, between two times; ``spans``: sections with the times at which they begin and
    end."""
    least = 1e-9 * (end - start)
    for section, begins, ends in spans:
        inside = min(end, ends) - max(start, begins)
        if inside >= ends - begins - least:
            yield section
        elif inside > least:
            yield _part(section, inside / (ends - begins))


def _part(section: Section, share: float) -> Section:
    """A share of a section's operations. Its inputs are as large as those of the whole section, and so is what it needs
    while it runs."""
    parts = dict[str, Any]()
    for name in (one.name for one in fields(section) if one.name not in ("entry", "working", "is_layer")):
        whole = getattr(section, name)
        if isinstance(whole, Seconds):
            parts[name] = Seconds(whole.compute * share, whole.communicate * share)
        elif isinstance(whole, (int, float)):
            parts[name] = type(whole)(whole * share)
    weights = (
        replace(weight, elements=round(weight.elements * share), whole=round(weight.whole * share))
        for weight in section.weights
    )
    blocks = (replace(b, rows=b.rows * share, tokens=round(b.tokens * share)) for b in section.blocks)
    parts |= {name: tuple(one * share for one in getattr(section, name)) for name in ("exchanged", "hosts")}
    return replace(section, **parts, weights=tuple(weights), blocks=tuple(blocks))
