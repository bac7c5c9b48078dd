"""Cuts the sections of a model into the chunks of a layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from autopar.errors import OptionsError
from autopar.layout import Layout
from autopar.layouts.sections.section import Chunk, Seconds, Section, Sections

from .pipeline_ranks import once_on_each_rank


def cut_into_chunks(sections: Sections, layout: Layout) -> list[Chunk]:
    """The sections of each chunk. Layouts that cut between the same layers share them. Raises :class:`OptionsError` if
    a chunk would be empty, or if the model has fewer layers than are offloaded."""
    if layout.offload_layers > len(sections.priced_as):
        count = len(sections.priced_as)
        raise OptionsError(
            f"Layout(offload_layers={layout.offload_layers}): the model has {count} layers; take {count}"
        )
    if layout.cuts == "operations":
        return _on_ranks(sections, _between_operations(sections, layout), layout)
    weights = layout.embedding_as_layers, layout.head_as_layers
    key = layout.pipeline, layout.interleave, layout.schedule_name, weights
    if key not in sections.cuts:
        sections.cuts[key] = _on_ranks(sections, _between_layers(sections, layout), layout)
    return sections.cuts[key]


def _on_ranks(sections: Sections, chunks: list[list[Section]], layout: Layout) -> list[Chunk]:
    distinct = (sections.before, *sections.layers, sections.after)
    is_shared = any(section.shared for section in distinct)
    return list(map(Chunk, once_on_each_rank(chunks, layout) if is_shared else chunks))


def _between_layers(sections: Sections, layout: Layout) -> list[list[Section]]:
    """Chunks whose numbers of layers differ by at most one. The short ones are at the ends, which also have the
    embedding and the loss, or only these. The embedding and the head take the place of as many layers as they count
    as."""
    layers = [sections.layers[i] for i in sections.priced_as]
    count, slots = layout.chunks, layout.embedding_as_layers + len(layers) + layout.head_as_layers
    if count > 1 and not layers:
        raise OptionsError(
            f"{layout}: the model has no layers to cut between (equal elements of a ModuleList, ModuleDict or "
            "Sequential); take pipeline=1, or cuts='operations'"
        )
    most = max(slots, len(layers) + 2) if layers else 1
    if count > most:
        raise OptionsError(
            f"{layout} cuts {len(layers)} layers into {count} chunks; at most {most} are possible, or more with "
            "cuts='operations'"
        )
    small, extra = divmod(slots, count)
    order = sorted(range(count), key=lambda c: -min(c, count - 1 - c))
    ends = list(accumulate(small + (order.index(c) < extra) for c in range(count)))
    chunks = [
        layers[max(0, start - layout.embedding_as_layers) : max(0, end - layout.embedding_as_layers)]
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    chunks[0] = [sections.before, *chunks[0]]
    chunks[-1] = [*chunks[-1], sections.after]
    if not all(chunks):
        raise OptionsError(f"{layout} cuts {len(layers)} layers so that a chunk has none; take fewer stages")
    return chunks


def recompute_seconds(section: Section, layout: Layout) -> Seconds:
    """The cost of recomputing a section in backward. It repeats the same share of forward's waiting for the host as of
    its computation, since saved operations are not launched again."""
    if not section.runs_backward:
        return Seconds()
    if section.is_layer and layout.recompute == "full":
        return section.forward
    again = section.again
    if section.is_layer and layout.recompute != "none":
        again += {
            "selective": section.inside,
            "elementwise": section.inside + section.rematerialised,
            "operations": section.forward - section.kept,
        }[layout.recompute]
    forward = section.forward.compute
    share = min(1.0, again.compute / forward) if forward else 0.0
    return replace(again, host=share * section.forward.host)


def _between_operations(sections: Sections, layout: Layout) -> list[list[Section]]:
    """Chunks of equal :func:`_work`: a section that crosses a cut is divided there in proportion."""
    every = sections.every
    ends = list(accumulate(_work(section, layout) for section in every))
    cuts = [ends[-1] * i / layout.chunks for i in range(layout.chunks + 1)]
    spans = list(zip(every, [0.0, *ends], ends, strict=False))
    return [list(_within(spans, start, end)) for start, end in pairwise(cuts)]


def _work(section: Section, layout: Layout) -> float:
    """Seconds of computation, of collectives of tensor and context ranks, and of waiting for the host, in turn.
    Excludes what is sent over data ranks (rows of experts, weights that ZeRO-3 gathers), so chunks take unequally long
    where sections send unequally much of it."""
    return (section.forward + section.backward + recompute_seconds(section, layout)).total


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
    """A share of a section's operations. Its inputs are as large as those of the whole section."""

    def of(seconds: Seconds) -> Seconds:
        return Seconds(seconds.compute * share, seconds.communicate * share, seconds.host * share)

    return replace(
        section,
        forward=of(section.forward),
        backward=of(section.backward),
        inside=of(section.inside),
        saved=int(section.saved * share),
        saved_inside=int(section.saved_inside * share),
        saved_last=int(section.saved_last * share),
        flops=section.flops * share,
        weights=tuple(
            replace(weight, elements=round(weight.elements * share), whole=round(weight.whole * share))
            for weight in section.weights
        ),
        blocks=tuple(replace(b, rows=b.rows * share, tokens=round(b.tokens * share)) for b in section.blocks),
        exchanged=tuple(nbytes * share for nbytes in section.exchanged),
        kept=of(section.kept),
        saved_kept=int(section.saved_kept * share),
        rematerialised=of(section.rematerialised),
        saved_rematerialised=int(section.saved_rematerialised * share),
        again=of(section.again),
        saved_again=int(section.saved_again * share),
        accumulating=section.accumulating * share,
    )
