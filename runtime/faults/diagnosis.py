"""Who waits for whom: one sentence about what keeps ranks waiting, from what all of them say of themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.runtime.comm.minority import named

from .pace import INTERVAL
from .record import Record

# Intervals (:mod:`.pace`) for which a rank has been still in a wait before it counts as waiting: messages of a step are
# faster, and where they are not, nothing follows from it alone. What two ranks have said may be an interval apart.
# Chosen: three looks.
STILL = 3.0
# As STILL, for ranks outside of autopar's calls, whose communication may be with others than these ranks.
# Chosen.
STILL_OUTSIDE = 10.0
# Intervals without a word after which a rank counts as silent, and no longer as waiting.
# Chosen: three intervals and a half.
SILENT = 3.5
# Intervals for which the cause of a failed communication may come to light before the failure itself is reported.
# Chosen.
CAUSE = 4.0
# Calls or places that a message lists.
# Chosen: a screen; each of thousands of ranks may be at a place of its own.
_LISTED = 16
# Planning may take its time, and so may a rank that rests outside of autopar, or does not answer but is there: this
# times the timeout. A rank that moves may take all the time that the process group's own timeout leaves.
# Chosen: ten minutes for the default of one.
LENIENCE = 10.0


@dataclass(frozen=True)
class Seen:
    """What the others know of ``rank``: its last ``record``, the seconds since (``silent``), whether its connection is
    ``open``, for how many seconds it has been known to be ``broken``, and of a silent process whether it is ``stopped``
    (False if nobody can tell) and its host can be ``reached``. ``interval``: between two of its messages."""

    rank: int
    record: Record
    silent: float = 0.0
    open: bool = True
    broken: float = 0.0
    stopped: bool = False
    reached: bool = True
    interval: float = INTERVAL

    @property
    def hears(self) -> bool:
        return self.open and self.silent < SILENT * self.interval

    @property
    def gone(self) -> bool:
        return not self.open or self.record.state == "ended"

    @property
    def failed(self) -> bool:
        """Whether it raised an error and nothing will follow: one that it caught counts once it has gone."""
        state = self.record.state
        return state == "failed" or (self.gone and state != "broken" and bool(self.record.note))

    @property
    def waiting(self) -> bool:
        """In a call, at the mercy of others."""
        record = self.record
        if not self.hears or not record.name:
            return False
        return record.state == "broken" or (record.waits and record.still >= STILL * self.interval)

    @property
    def waits_elsewhere(self) -> bool:
        return (
            self.hears
            and not self.record.name
            and self.record.waits
            and self.record.still >= STILL_OUTSIDE * self.interval
        )


def diagnose(everyone: Sequence[Seen]) -> str | None:
    """The message for all ranks, or None as long as there may be nothing wrong."""
    waiting = [seen for seen in everyone if seen.waiting]
    if not waiting:
        return None
    sentence = (
        _gone(everyone, waiting)
        or _differing(everyone, waiting)
        or _late(everyone, waiting)
        or _broken(everyone, waiting)
    )
    return sentence and f"{sentence}\n{_details(everyone)}"


def patience(everyone: Sequence[Seen]) -> tuple[float, str]:
    """For how many seconds ranks have waited for others that may still come, and a sentence about it; "" before they
    have waited as long as ``Options(timeout=)`` says."""
    waiting = [seen for seen in everyone if seen.waiting]
    others = [seen for seen in everyone if not seen.waiting and not seen.gone]
    waited = max((seen.record.still for seen in waiting), default=0.0)
    if not others or waited < max(seen.record.timeout for seen in everyone):
        return waited, ""
    how = "rests" if others[0].record.still else "moves"
    state = f"and {how}" if others[0].hears else "and does not answer"
    return (
        waited,
        f"{_named(others)}: {others[0].record.place}, {state}; {_who_wait(waiting, others)} since {waited:.0f} s",
    )


def _gone(everyone: Sequence[Seen], waiting: Sequence[Seen]) -> str | None:
    """A rank that has raised an error, died, or ended, unless the others wait in a call that it left before."""
    missed = [seen for seen in everyone if seen.gone and _is_missed(seen, waiting)]
    failed = [seen for seen in everyone if seen.failed and (seen in missed or seen.record.state == "failed")]
    if failed:
        return f"rank {failed[0].rank} failed: {failed[0].record.note}; {_who_wait(waiting)}"
    died = [seen for seen in missed if seen.record.state != "ended"]
    if died:
        record = died[0].record
        return (
            f"rank {died[0].rank} died without a word ({record.where}; it was killed, crashed, or left by os._exit), "
            f"last seen {record.place}; {_who_wait(waiting)}"
        )
    if missed:
        return (
            f"the script of {_named(missed)} came to its end after {missed[0].record.number} collective calls; "
            f"{_who_wait(waiting, missed)}: every rank must make the same calls, with as many batches"
        )
    return None


def _is_missed(seen: Seen, waiting: Sequence[Seen]) -> bool:
    """Whether a rank that has gone is what others wait for, and not another one that is slow in their last call."""
    latest = max(each.record.number for each in waiting)
    late = any(each.record.still >= each.record.timeout or each.record.state == "broken" for each in waiting)
    return bool(seen.record.name) or seen.record.number < latest or late


def _differing(everyone: Sequence[Seen], waiting: Sequence[Seen]) -> str | None:
    """Ranks that all wait, in different calls: none will go on. Numbers of calls of one name decide only in the end:
    ranks may have made a call that needs no others, and groups of ranks may be slow on their own."""
    if not all(seen.waiting or seen.waits_elsewhere for seen in everyone):
        return None
    if len({seen.record.name for seen in everyone}) == 1 and not _all_still(everyone):
        return None
    calls: dict[str, list[Seen]] = {}
    for seen in everyone:
        calls.setdefault(seen.record.call if seen.record.name else seen.record.place, []).append(seen)
    if len(calls) == 1:
        return None
    groups = "; ".join(f"{_named(group)} in {call}" for call, group in _smallest_first(calls)[:_LISTED])
    return (
        f"ranks wait for each other in different calls: {groups.replace(' in outside', ' outside')}. All ranks must "
        "make the same collective calls in the same order: move the call out of a branch such as `if rank == 0:`"
    )


def _all_still(everyone: Sequence[Seen]) -> bool:
    """Whether none has moved for as long as ranks may wait."""
    return min(seen.record.still for seen in everyone) >= max(seen.record.timeout for seen in everyone)


def _late(everyone: Sequence[Seen], waiting: Sequence[Seen]) -> str | None:
    """Ranks for which the others have waited longer than they may. None as long as any of them may still come."""
    limit = max(seen.record.timeout for seen in everyone)
    waited = max(seen.record.still for seen in waiting)
    others = [seen for seen in everyone if not seen.waiting]
    if not others:
        if not _all_still(everyone):
            return None
        return f"no message has arrived for {waited:.0f} s, longer than Options(timeout={limit:g}) allows, on any rank"
    if not all(_is_overdue(seen, waited, limit, waiting) for seen in others):
        return None
    silent = [seen for seen in others if not seen.hears and not seen.gone]
    if silent:
        verb, does, it = ("is", "does", "it is") if len(silent) == 1 else ("are", "do", "they are")
        state = f"{verb} stopped (SIGSTOP)" if silent[0].stopped else f"{does} not answer: {it} stopped, or cut off"
        return (
            f"{_named(silent)} ({silent[0].record.where}) {state}, last seen {silent[0].record.place}; "
            f"{_who_wait(waiting, silent)} since {waited:.0f} s"
        )
    absent = [seen for seen in others if not seen.waits_elsewhere] or others
    return (
        f"{_named(absent)} {'is' if len(absent) == 1 else 'are'} {absent[0].record.place}; "
        f"{_who_wait(waiting, absent)} since {waited:.0f} s, longer than Options(timeout={limit:g}) "
        f"allows{_raised(absent[0])}"
    )


def _is_overdue(seen: Seen, waited: float, limit: float, waiting: Sequence[Seen]) -> bool:
    """Whether nothing more is to be expected from a rank for which others have ``waited``."""
    if seen.gone or seen.waits_elsewhere:
        return waited >= limit
    if not seen.hears:
        lenient = seen.reached and not seen.stopped  # Python's lock may be held by what computes.
        allowed = limit * (LENIENCE if lenient else 1)
        return seen.silent >= allowed and waited + SILENT * seen.interval >= allowed
    allowed = limit * (LENIENCE if _may_come(seen, waiting) else 1)
    return min(seen.record.still, waited) >= allowed


def _may_come(seen: Seen, waiting: Sequence[Seen]) -> bool:
    """Whether a rank that rests is given more time: it plans, or is outside of autopar (a slow disk looks like a lock),
    and has neither raised an error nor left the call behind in which the others wait."""
    record = seen.record
    behind = record.number < min(each.record.number for each in waiting)
    return record.planning or (not record.name and not record.note and behind)


def _broken(everyone: Sequence[Seen], waiting: Sequence[Seen]) -> str | None:
    """A communication that failed, though nothing is known to be wrong: the process group's own timeout, a cable."""
    broken = [seen for seen in waiting if seen.broken >= CAUSE * seen.interval]
    if not broken:
        return None
    others = [seen for seen in everyone if not seen.waiting and not seen.gone]
    verb = "was" if len(others) == 1 else "were"
    meanwhile = f"; {_named(others)} {verb} {others[0].record.place}" if others else ""
    return f"the communication of {_named(broken)} failed {broken[0].record.place}: {broken[0].record.note}{meanwhile}"


def _raised(seen: Seen) -> str:
    note = seen.record.note
    return note and f"; its last call raised {note}"


def _who_wait(waiting: Sequence[Seen], late: Sequence[Seen] = ()) -> str:
    places: dict[str, list[Seen]] = {}
    for seen in waiting:
        places.setdefault(replace(seen.record, instruction="").place, []).append(seen)
    place, group = max(places.items(), key=lambda entry: len(entry[1]))
    return f"{_named(group)} {'waits' if len(group) == 1 else 'wait'} for {'them' if len(late) > 1 else 'it'} {place}"


def _details(everyone: Sequence[Seen]) -> str:
    """A line for each set of ranks that are at the same place, of many the smallest sets."""
    lines: dict[str, list[Seen]] = {}
    for seen in everyone:
        lines.setdefault(_state(seen), []).append(seen)
    sets = _smallest_first(lines)
    text = "\n".join(f"  {_named(group)}: {state}" for state, group in sets[:_LISTED])
    return text + (f"\n  and {len(sets) - _LISTED} more places" if len(sets) > _LISTED else "")


def _state(seen: Seen) -> str:
    record = seen.record
    if seen.failed:
        return f"failed: {record.note}"
    if record.state == "ended":
        return "ended"
    if not seen.open:
        return f"gone, last seen {record.place}"
    if not seen.hears:
        return f"silent, last seen {record.place}"
    return f"{'waiting' if record.waits else 'running'} {record.place}{'' if record.name else _raised(seen)}"


def _smallest_first(groups: Mapping[str, list[Seen]]) -> list[tuple[str, list[Seen]]]:
    return sorted(groups.items(), key=lambda entry: (len(entry[1]), entry[1][0].rank))


def _named(group: Sequence[Seen]) -> str:
    return named([seen.rank for seen in group])
