"""What a search over divisions of the devices covered, in words."""

from __future__ import annotations

from autopar.ir.searched import Searched

from .quantities import duration


def coverage(found: Searched, seconds: float) -> str:
    """The sentence on ``found`` in the text of a plan that takes ``seconds``.

    >>> coverage(Searched(100, 20, 3, 40, 0.9, "pipeline=2"), 1.0)  # doctest: +NORMALIZE_WHITESPACE
    'search 3 of 100 divisions into stages, data and tensor ranks, microbatches and chunks solved, 40 excluded by their
    bounds; none takes less than 900 ms (within 10%); of 57 others the first is pipeline=2: plan.table(by="division")'
    """
    text = (
        f"search {found.solved} of {found.divisions} divisions into stages, data and tensor ranks, microbatches and "
        f"chunks solved, {found.excluded} excluded by their bounds"
    )
    if found.bound >= seconds:
        return f"{text}: no other is quicker"
    text += f"; none takes less than {duration(found.bound)} (within {found.gap(seconds):.0%})"
    return (
        f'{text}; of {found.left} others the first is {found.first}: plan.table(by="division")' if found.first else text
    )
