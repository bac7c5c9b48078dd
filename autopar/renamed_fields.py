"""Old names of a dataclass's fields, which still work and warn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

C = TypeVar("C")


@dataclass(frozen=True)
class Renamed:
    """What a field is called now; ``is_negated``: a flag whose new name says the opposite."""

    new: str
    is_negated: bool = False

    def convert(self, value: object) -> object:
        """The new field's value from the old one's, and back."""
        return not value if self.is_negated and isinstance(value, bool) else value


# The old names of fields of ``Layout``. Its constructor, attributes and text still take them.
LAYOUT_FIELDS: Mapping[str, Renamed] = {
    "adding": Renamed("gradient_accumulation_fusion", is_negated=True),
    "apart": Renamed("separate_dgrad_reductions"),
    "balanced": Renamed("context_load_balancing"),
    "graphed": Renamed("cuda_graphs"),
    "holds": Renamed("retained_inputs"),
    "lead": Renamed("embedding_as_layers"),
    "tail": Renamed("head_as_layers"),
    "whole": Renamed("replicated"),
}


def accepts_old_names(renamed: Mapping[str, Renamed]) -> Callable[[type[C]], type[C]]:
    """A decorator for dataclasses: the constructor takes old names as keywords, and attributes can be read by them,
    each with a :class:`DeprecationWarning`. An old name wins over the new one, since :func:`dataclasses.replace` passes
    every field on."""

    def decorate(cls: type[C]) -> type[C]:
        initialise = cls.__init__

        @wraps(initialise)
        def initialise_renamed(self: C, *args: object, **kwargs: object) -> None:
            for old in [name for name in kwargs if name in renamed]:
                _warn(cls.__name__, old, renamed[old])
                kwargs[renamed[old].new] = renamed[old].convert(kwargs.pop(old))
            initialise(self, *args, **kwargs)

        def read_renamed(self: C, name: str) -> Any:
            if name not in renamed:
                raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}", name=name, obj=self)
            _warn(cls.__name__, name, renamed[name])
            return renamed[name].convert(getattr(self, renamed[name].new))

        cls.__init__ = initialise_renamed  # type: ignore[assignment]
        # Set so that mypy does not take every attribute for known.
        setattr(cls, "__getattr__", read_renamed)  # noqa: B010
        return cls

    return decorate


def _warn(owner: str, old: str, renamed: Renamed) -> None:
    opposite = ", which says the opposite" if renamed.is_negated else ""
    warnings.warn(f"{owner}.{old} is deprecated; use {owner}.{renamed.new}{opposite}", DeprecationWarning, stacklevel=3)
