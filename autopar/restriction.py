"""What a layout restricts in the search for a plan: the fields that were given, of those that plans can have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import OptionsError
from .given_fields import own_fields
from .layout import Layout

# Fields of a layout that are options of a plan too, by the names of the options.
SHARED: Mapping[str, str] = {
    "pipeline": "stages",
    "schedule": "schedule",
    "recompute": "recompute",
    "zero": "zero",
    "offload": "offload",
    "precision": "precision",
}


@dataclass(frozen=True)
class Restriction:
    """What a layout fixes beyond the options of its :data:`SHARED` fields; None searches. Fields as those of
    :class:`Layout`."""

    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    context: int | None = None
    expert: int | None = None
    microbatch: int | None = None
    interleave: int | None = None
    sequence_parallel: bool | None = None

    @staticmethod
    def of(layout: Layout | None) -> Restriction:
        """The restriction by ``layout``; None restricts nothing."""
        given = () if layout is None else layout.given
        names = [field.name for field in fields(Restriction) if field.name in given]
        return Restriction(**{name: getattr(layout, name) for name in names})


def check_layout(layout: object) -> None:
    """Raises :class:`OptionsError` for what is no layout, or is of a kind that no plan can have."""
    if isinstance(layout, Layout) and type(layout) is not Layout:
        raise OptionsError(
            f"layout is a {type(layout).__name__}: prices are those of plans, and no plan does what its fields add; "
            "give an autopar.Layout (what other systems do is priced by benchmarks.recipes, see docs/published.md)"
        )
    if not isinstance(layout, Layout):
        raise OptionsError(f"layout={layout!r} is not an autopar.Layout; write layout=autopar.Layout(tensor=2, data=4)")


def shared_options(layout: Layout) -> dict[str, Any]:
    """The options that the given fields of ``layout`` fix, by name."""
    options = {SHARED[name]: getattr(layout, name) for name in layout.given if name in SHARED}
    return {name: value for name, value in options.items() if value is not None}


def words_of(layout: Layout | None) -> str:
    """A layout as its user wrote it, for messages: ``Layout(tensor=2, data=4)``. Of one that was completed, of which
    nobody wrote every field, what differs from the defaults."""
    if layout is None:
        return ""
    shown, usual = layout.given, {each.name: each.default for each in own_fields(layout)}
    if {*layout.numbers, *layout.flags} <= set(shown):
        shown = tuple(name for name in shown if getattr(layout, name) != usual[name])
    return f"Layout({', '.join(f'{name}={getattr(layout, name)!r}' for name in shown)})"
