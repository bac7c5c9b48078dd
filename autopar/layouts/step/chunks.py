"""Where a layout cuts the sections of a model into chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from autopar.errors import OptionsError
from autopar.layout import Layout
from autopar.layouts.sections.section import Seconds, Section, Sections

from .pipeline_ranks import once_on_each_rank


def cut_into_chunks(sections: Sections, layout: Layout) -> list[list[Section]]:
    """The sections of each chunk. Raises :class:`OptionsError` if a chunk would have none, or there are fewer layers
    than are offloaded."""
    if layout.offload_layers > len(sections.priced_as):
        count = len(sections.priced_as)
        raise OptionsError(
            f"Layout(offload_layers={layout.offload_layers}): the model has {count} layers; take {count}"
        )
    cut = _between_operations if layout.cuts == "operations" else _between_layers
    found = cut(sections, layout)
    each = (sections.before, *sections.layers, sections.after)
    return once_on_each_rank(found, layout) if any(section.shared for section in each) else found


def _between_layers(sections: Sections, layout: Layout) -> list[list[Section]]:
    """Layers in as many chunks, equal but for one layer; the short ones are those at the ends, which have embeddings
    and the loss besides, or only these. What these count as takes the place of layers."""
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
            f"{layout} cuts {len(layers)} layers into {count} chunks; at most {most} can be had, or more with "
            "cuts='operations'"
        )
    small, extra = divmod(slots, count)
    order = sorted(range(count), key=lambda c: -min(c, count - 1 - c))
    ends = list(accumulate(small + (order.index(c) < extra) for c in range(count)))
    found = [
        layers[max(0, start - layout.embedding_as_layers) : max(0, end - layout.embedding_as_layers)]
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    found[0] = [sections.before, *found[0]]
    found[-1] = [*found[-1], sections.after]
    if not all(found):
        raise OptionsError(f"{layout} cuts {len(layers)} layers so that a chunk has none; take fewer stages")
    return found


def computed_again(section: Section, layout: Layout) -> Seconds:
    """What backward computes again of a section. Of forward's waiting for the host it repeats as large a share as of
    its computing: what is kept is not started again."""
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
    whole = section.forward.compute
    share = min(1.0, again.compute / whole) if whole else 0.0
    return replace(again, host=share * section.forward.host)


def _between_operations(sections: Sections, layout: Layout) -> list[list[Section]]:
    """Chunks of equal :func:`_work`: a section that reaches over an end is divided there in proportion."""
    every = sections.every
    ends = list(accumulate(_work(section, layout) for section in every))
    cuts = [ends[-1] * i / layout.chunks for i in range(layout.chunks + 1)]
    spans = list(zip(every, [0.0, *ends], ends, strict=False))
    return [list(_within(spans, start, end)) for start, end in pairwise(cuts)]


def _work(section: Section, layout: Layout) -> float:
    """Seconds of computing, of tensor and context ranks' collectives and of waiting for the host, in turn. What is sent
    over data ranks (rows of experts, weights that ZeRO-3 gathers) is left out: with it chunks are unequal where
    sections have unequally much of it."""
    return (section.forward + section.backward + computed_again(section, layout)).total


def _within(spans: list[tuple[Section, float, float]], start: float, end: float) -> Iterator[Section]:
    """What lies between two times of sections that take from one time to another."""
    least = 1e-9 * (end - start)
    for section, begins, ends in spans:
        inside = min(end, ends) - max(start, begins)
        if inside >= ends - begins - least:
            yield section
        elif inside > least:
            yield _part(section, inside / (ends - begins))


def _part(section: Section, share: float) -> Section:
    """A share of the operations of a section, which takes in as much as the whole."""

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
        weights=tuple(replace(weight, elements=round(weight.elements * share)) for weight in section.weights),
        blocks=tuple(replace(b, rows=b.rows * share, tokens=round(b.tokens * share)) for b in section.blocks),
        exchanged=tuple(nbytes * share for nbytes in section.exchanged),
        kept=of(section.kept),
        saved_kept=int(section.saved_kept * share),
        rematerialised=of(section.rematerialised),
        saved_rematerialised=int(section.saved_rematerialised * share),
        again=of(section.again),
        saved_again=int(section.saved_again * share),
    )
