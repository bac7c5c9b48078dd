"""Caches traces: an equal model and call are traced once, in this process, in the next run and on other ranks.

One rank traces and sends the result to the others, which would otherwise compute the same at the same time, on the same
processors. A rank whose model or call differs traces for itself.
"""

from __future__ import annotations

import logging
import pickle
from collections import OrderedDict
from dataclasses import dataclass, replace

import torch.distributed as dist

from autopar.content.cache_folder import caching_enabled
from autopar.content.disk_cache import read, write
from autopar.content.files_read import files_read
from autopar.errors import AutoparError, TraceError
from autopar.runtime.comm.groups import AxisGroup
from autopar.torch_internals.joint_graphs import load_tracer
from autopar.trace.capture import Request
from autopar.trace.counters import warn_of_counters
from autopar.trace.lengths import BATCH, real_lengths
from autopar.trace.tracer import Traced, traced_request

from .entry import Entry, Uncacheable, differences
from .key import trace_key

KIND = "traces"
_entries: OrderedDict[str, Entry] = OrderedDict()
# Traces kept in this process. Chosen: that of a plan, and TRACES others (compiler/calls.py).
_ENTRIES_LIMIT = 16
_log = logging.getLogger(__name__)


def forget() -> None:
    """Forgets the traces of this process; those on disk stay."""
    _entries.clear()


def traced_once(request: Request, ranks: AxisGroup | None = None) -> Traced:
    """What :func:`autopar.trace.tracer.traced_request` returns, from the cache if it is there. Collective over
    ``ranks``, if given. Raises :class:`TraceError`."""
    if not caching_enabled():
        return traced_request(request)
    key = _key(request)
    if ranks is None or ranks.size == 1:
        return _cached(key, request) or _make(key, request)
    return _shared(key, request, ranks)


def _key(request: Request) -> str | None:
    try:
        return trace_key(request)
    except Exception as reason:  # Unkeyable, or whatever an object raises when its attributes are read.
        _log.debug("this trace is not cached: %s: %s", type(reason).__name__, reason)
        return None


def _cached(key: str | None, request: Request) -> Traced | None:
    if key is None:
        return None
    if key not in _entries:
        text = read(KIND, key)
        if text is None or not _load(key, text):
            return None
    _entries.move_to_end(key)
    try:
        traced = _entries[key].bind(request)
    except (ValueError, AttributeError, KeyError) as error:
        _log.debug("trace %s does not fit: %s", key, error)
        return None
    if request.lengths:  # Their sizes are no part of the key.
        real = {BATCH: request.call.batch, **real_lengths(request.lengths, request.call.tensors)}
        if not traced.holds_at(real):
            return None
        symbols = tuple((name, real[name]) for name, _ in traced.graph.symbols)
        traced = replace(traced, graph=replace(traced.graph, symbols=symbols))
    if traced.counted:  # Tracing would warn too.
        warn_of_counters(request.model, traced.counted)
    return traced


def _load(key: str, text: str) -> bool:
    """Reads an entry, which any process may have written; False if it cannot be read."""
    try:
        _remember(key, Entry.from_text(text))
    except Exception as error:  # From json, sympy, safetensors or torch: in any case, the model is traced again.
        _log.debug("trace %s is not used: %s: %s", key, type(error).__name__, error)
        return False
    return True


def _remember(key: str, entry: Entry) -> None:
    _entries[key] = entry
    while len(_entries) > _ENTRIES_LIMIT:
        _entries.popitem(last=False)


def _make(key: str | None, request: Request) -> Traced:
    load_tracer()  # Before files are watched, of which imports open some.
    with files_read() as read_files:
        traced = traced_request(request)
    if key is None:
        return traced
    try:
        if read_files:
            raise Uncacheable(f"tracing it did this: {read_files[0]}")
        text = Entry.of(traced, request).to_text()
        entry = Entry.from_text(text)
        changed = differences(traced, entry.bind(request))
        if changed:
            raise Uncacheable(f"read back, it differs in {', '.join(changed)}")
    except Exception as reason:  # As in reading: what has no complete text is not cached.
        _log.debug("this trace is not cached: %s: %s", type(reason).__name__, reason)
        return traced
    _remember(key, entry)
    write(KIND, key, text)
    return traced


@dataclass(frozen=True)
class _Message:
    """What the first rank sends the others: its entry as text, or the error of tracing."""

    text: str | None = None
    error: AutoparError | None = None


def _shared(key: str | None, request: Request, ranks: AxisGroup) -> Traced:
    """The first rank's trace on all ranks with the same request."""
    everyone: list[tuple[str | None, bool]] = [(None, False)] * ranks.size
    dist.all_gather_object(everyone, (key, key in _entries), group=ranks.group)
    first = everyone[0][0]
    waiting = [rank for rank, (own, knows) in enumerate(everyone) if rank and own == first and not knows]
    if first is None or not waiting:
        return _cached(key, request) or _make(key, request)
    if ranks.index == 0:
        return _trace_and_send(first, request, ranks)
    box: list[_Message] = [_Message()]
    dist.broadcast_object_list(box, group=ranks.group, group_src=0)
    if key == first and box[0].error is not None:
        raise box[0].error
    if key == first and box[0].text is not None and key not in _entries:
        _load(first, box[0].text)
    return _cached(key, request) or _make(key, request)


def _trace_and_send(key: str, request: Request, ranks: AxisGroup) -> Traced:
    """The trace, which is also sent to the other ranks; an error is sent as well, since they wait."""
    message = _Message()
    try:
        traced = _cached(key, request) or _make(key, request)
        message = _Message(_entries[key].to_text() if key in _entries else None)
        return traced
    except AutoparError as error:
        message = _Message(error=_sendable(error))
        raise
    finally:
        dist.broadcast_object_list([message], group=ranks.group, group_src=0)


def _sendable(error: AutoparError) -> AutoparError:
    """``error`` if it can be pickled, else one with its message."""
    try:
        copy: AutoparError = pickle.loads(pickle.dumps(error))
        return copy
    except Exception:
        return TraceError(str(error))
