"""Cuts the sections of a model into the chunks of a layout."""

from __future__ import annotations

from itertools import accumulate

from autopar.errors import OptionsError
from autopar.layout import Layout
from benchmarks.emulator.sections.section import Chunk, Section, Sections

from .pipeline_ranks import once_on_each_rank


def cut_into_chunks(sections: Sections, layout: Layout, before: int = 0, after: int = 0) -> list[Chunk]:
    """The sections of each chunk, cut between layers. Chunks differ by at most one layer; the short ones are at the
    ends, which also have the embedding and the loss, or only these. Layouts that cut between the same layers share
    them.

    Args:
        before, after: how many layers the embedding, and everything after the layers, take the place of.

    Raises:
        OptionsError: a chunk would be empty.
    """
    key = layout.pipeline, layout.interleave, layout.schedule_name, before, after
    if key not in sections.cuts:
        sections.cuts[key] = on_ranks(sections, _between_layers(sections, layout, before, after), layout)
    return sections.cuts[key]


def on_ranks(sections: Sections, chunks: list[list[Section]], layout: Layout) -> list[Chunk]:
    """Chunks whose shared weights are once on each rank."""
    distinct = (sections.before, *sections.layers, sections.after)
    is_shared = any(section.shared for section in distinct)
    return list(map(Chunk, once_on_each_rank(chunks, layout) if is_shared else chunks))


def _between_layers(sections: Sections, layout: Layout, before: int, after: int) -> list[list[Section]]:
    layers = [sections.layers[i] for i in sections.priced_as]
    count, slots = layout.chunks, before + len(layers) + after
    if count > 1 and not layers:
        raise OptionsError(
            f"{layout}: the model has no layers to cut between (equal elements of a ModuleList, ModuleDict or "
            "Sequential); take pipeline=1"
        )
    most = max(slots, len(layers) + 2) if layers else 1
    if count > most:
        raise OptionsError(f"{layout} cuts {len(layers)} layers into {count} chunks; at most {most} are possible")
    small, extra = divmod(slots, count)
    order = sorted(range(count), key=lambda c: -min(c, count - 1 - c))
    ends = list(accumulate(small + (order.index(c) < extra) for c in range(count)))
    chunks = [
        layers[max(0, start - before) : max(0, end - before)] for start, end in zip([0, *ends], ends, strict=False)
    ]
    chunks[0] = [sections.before, *chunks[0]]
    chunks[-1] = [*chunks[-1], sections.after]
    if not all(chunks):
        raise OptionsError(f"{layout} cuts {len(layers)} layers so that a chunk has none; take fewer stages")
    return chunks
