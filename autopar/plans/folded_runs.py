"""The action lists of a schedule, folded: what a rank does for many microbatches in turn is written once.

``[F0.0 SF0>1.0]*3+1`` stands for three times what is in brackets, each time with microbatches one later::

    F0.0 SF0>1.0 F0.1 SF0>1.1 F0.2 SF0>1.2

Actions are as in the text form of schedules (:mod:`autopar.schedule.text`). Invariant: :func:`unfolded` of
:func:`folded` is what was folded, if it had no brackets, which no action has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from autopar.errors import OptionsError

# Actions of a run that repeats. Chosen: of 1F1B with four chunks on eight stages, 192.
_LONGEST = 256
# Characters of a text, unfolded, which no plan reaches: a run of few may stand for any number.
_MOST = 1 << 26
_RUN = re.compile(r"\[([^\[\]]*)\]\*([1-9]\d{0,8})\+([1-9]\d{0,8})")
_BRACKET = re.compile(r"\S*[\[\]][^\]]*\]?\S*")
_ACTION = re.compile(r"(.+\.)(0|[1-9]\d*)")
# What an action does, and its microbatch; None: it has none.
_Action = tuple[str, int | None]


def folded(text: str) -> str:
    """The folded form of the actions of one rank."""
    return " ".join(_runs([_read(action) for action in text.split()]))


def unfolded(text: str) -> str:
    """Inverse of :func:`folded`. Raises :class:`OptionsError` for a run of another form, or one that stands for more
    than any schedule has."""
    left = _MOST

    def run(match: re.Match[str]) -> str:
        nonlocal left
        body, count, step = match[1].split(), int(match[2]), int(match[3])
        left -= count * (len(match[1]) + 1)
        if left < 0:
            raise OptionsError(f"{match[0]:.80} stands for more actions than any schedule has")
        actions = [_read(action) for action in body]
        return " ".join(_shown(action, time * step) for time in range(count) for action in actions)

    whole = _RUN.sub(run, text)
    if wrong := _BRACKET.search(whole):
        raise OptionsError(f"{wrong[0]:.80} is no run of actions, such as [F0.0 SF0>1.0]*3+1")
    return whole


def _read(text: str) -> _Action:
    match = _ACTION.fullmatch(text)
    return (match[1], int(match[2])) if match else (text, None)


def _shown(action: _Action, later: int = 0) -> str:
    what, microbatch = action
    return what if microbatch is None else f"{what}{microbatch + later}"


def _runs(actions: Sequence[_Action]) -> Iterator[str]:
    """The parts of the folded form."""
    at = 0
    while at < len(actions):
        length, step, count = _longest_run(actions, at)
        body = " ".join(map(_shown, actions[at : at + length]))
        yield f"[{body}]*{count}+{step}" if count > 1 else body
        at += length * count


def _longest_run(actions: Sequence[_Action], at: int) -> tuple[int, int, int]:
    """The length, the step and the count of the run that begins at ``at`` and covers most; one action, once, if there
    is none."""
    best = (1, 0, 1)
    for length in range(1, min(_LONGEST, (len(actions) - at) // 2) + 1):
        if best[2] > 1 and length % best[0] == 0:
            continue  # It ends where that ends.
        step = _step(actions[at], actions[at + length])
        count = _count(actions, at, length, step) if step else 1
        if count > 1 and length * count > best[0] * best[2]:
            best = length, step, count
    return best


def _step(first: _Action, later: _Action) -> int:
    """By how many microbatches an action is later than one that is equal otherwise; 0 if it is not."""
    if first[0] != later[0] or first[1] is None or later[1] is None:
        return 0
    return max(later[1] - first[1], 0)


def _count(actions: Sequence[_Action], at: int, length: int, step: int) -> int:
    """How often the actions from ``at`` on repeat, each time ``step`` microbatches later."""
    place = at + length
    while place < len(actions) and _step(actions[place - length], actions[place]) == step:
        place += 1
    return (place - at) // length
