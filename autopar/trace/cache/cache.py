"""Traces made once: of an equal model and call there is one, in this process, in the next run and on other ranks.

One rank traces and tells the others, which would find the same at the same time, on the same processors. A rank whose
model or call differs traces for itself.
"""

from __future__ import annotations

import logging
import pickle
from collections import OrderedDict
from dataclasses import dataclass

import torch.distributed as dist

from autopar.content.cache_folder import caching_enabled
from autopar.content.disk_cache import read, write
from autopar.content.files_read import files_read
from autopar.errors import AutoparError, TraceError
from autopar.runtime.comm.groups import AxisGroup
from autopar.trace.capture import Request
from autopar.trace.counters import warn_of_counters
from autopar.trace.tracer import Traced, traced_request

from .entry import Entry, Unkeepable, differences
from .key import trace_key

KIND = "traces"
_known: OrderedDict[str, Entry] = OrderedDict()
# Traces kept in this process. Chosen: that of a plan, and TRACES others (compiler/calls.py).
_KNOWN_LIMIT = 16
_log = logging.getLogger(__name__)


def forget() -> None:
    """Forgets the traces of this process; those on disk stay."""
    _known.clear()


def traced_once(request: Request, ranks: AxisGroup | None = None) -> Traced:
    """What :func:`autopar.trace.tracer.traced_request` gives, made now or kept from before. Collective over
    ``ranks``, if given.
    Raises :class:`TraceError`."""
    if not caching_enabled():
        return traced_request(request)
    key = _key(request)
    if ranks is None or ranks.size == 1:
        return _kept(key, request) or _made(key, request)
    return _shared(key, request, ranks)


def _key(request: Request) -> str | None:
    try:
        return trace_key(request)
    except Exception as reason:  # Unkeyable, or what an object raises when it is looked at.
        _log.debug("this trace is not kept: %s: %s", type(reason).__name__, reason)
        return None


def _kept(key: str | None, request: Request) -> Traced | None:
    if key is None:
        return None
    if key not in _known:
        text = read(KIND, key)
        if text is None or not _learn(key, text):
            return None
    _known.move_to_end(key)
    try:
        found = _known[key].bind(request)
    except (ValueError, AttributeError, KeyError) as error:
        _log.debug("trace %s does not fit: %s", key, error)
        return None
    if found.counted:  # As making it would.
        warn_of_counters(request.model, found.counted)
    return found


def _learn(key: str, text: str) -> bool:
    """Reads an entry, whoever wrote it."""
    try:
        _remember(key, Entry.from_text(text))
    except Exception as error:  # Of json, sympy, safetensors, torch: whatever is wrong, the trace is made anew.
        _log.debug("trace %s is not used: %s: %s", key, type(error).__name__, error)
        return False
    return True


def _remember(key: str, entry: Entry) -> None:
    _known[key] = entry
    while len(_known) > _KNOWN_LIMIT:
        _known.popitem(last=False)


def _made(key: str | None, request: Request) -> Traced:
    with files_read() as read_files:
        traced = traced_request(request)
    if key is None:
        return traced
    try:
        if read_files:
            raise Unkeepable(f"while it was made there was {read_files[0]}")
        text = Entry.of(traced, request).to_text()
        entry = Entry.from_text(text)
        found = differences(traced, entry.bind(request))
        if found:
            raise Unkeepable(f"read again, it has other {', '.join(found)}")
    except Exception as reason:  # As in reading: what cannot be told in full is not kept.
        _log.debug("this trace is not kept: %s: %s", type(reason).__name__, reason)
        return traced
    _remember(key, entry)
    write(KIND, key, text)
    return traced


@dataclass(frozen=True)
class _Said:
    """What the first rank tells the others: its entry as text, or the error that its model makes."""

    text: str | None = None
    error: AutoparError | None = None


def _shared(key: str | None, request: Request, ranks: AxisGroup) -> Traced:
    """The first rank's trace on all ranks that ask for the same."""
    everyone: list[tuple[str | None, bool]] = [(None, False)] * ranks.size
    dist.all_gather_object(everyone, (key, key in _known), group=ranks.group)
    first = everyone[0][0]
    waiting = [rank for rank, (own, knows) in enumerate(everyone) if rank and own == first and not knows]
    if first is None or not waiting:
        return _kept(key, request) or _made(key, request)
    if ranks.index == 0:
        return _told(first, request, ranks)
    box: list[_Said] = [_Said()]
    dist.broadcast_object_list(box, group=ranks.group, group_src=0)
    if key == first and box[0].error is not None:
        raise box[0].error
    if key == first and box[0].text is not None and key not in _known:
        _learn(first, box[0].text)
    return _kept(key, request) or _made(key, request)


def _told(key: str, request: Request, ranks: AxisGroup) -> Traced:
    """The trace, told to the other ranks, which wait for it whatever happens."""
    said = _Said()
    try:
        traced = _kept(key, request) or _made(key, request)
        said = _Said(_known[key].to_text() if key in _known else None)
        return traced
    except AutoparError as error:
        said = _Said(error=_sendable(error))
        raise
    finally:
        dist.broadcast_object_list([said], group=ranks.group, group_src=0)


def _sendable(error: AutoparError) -> AutoparError:
    """The error without what cannot be sent."""
    try:
        found: AutoparError = pickle.loads(pickle.dumps(error))
        return found
    except Exception:
        return TraceError(str(error))
