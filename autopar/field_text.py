"""Values of fields as words of a text, such as those of a layout, and words in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import OptionsError


def written(value: object) -> str:
    """A value as :func:`read` reads it; values of a tuple are joined by plus signs."""
    return "+".join(value) if isinstance(value, tuple) else str(value)


def read(name: str, text: str, default: object) -> object:
    """``text`` as a value of the type of ``default``. Raises :class:`OptionsError`."""
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, (int, float)):
            return type(default)(text)
    except (KeyError, ValueError) as error:
        kind = "true or false" if isinstance(default, bool) else "a number"
        raise OptionsError(f"{name}={text} in a layout: not {kind}") from error
    return tuple(part for part in text.split("+") if part) if isinstance(default, tuple) else text


def in_sentence(words: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
