"""The containers among Python values, with copies, to give them their items back."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)


def contents_of(values: Iterable[object]) -> list[tuple[Any, Any]]:
    """The containers among ``values`` and inside them, each with a copy: members, hooks, caches of a model."""
    copies: dict[int, tuple[Any, Any]] = {}
    queue: deque[Any] = deque(values)
    while queue:
        value = queue.popleft()
        if type(value) in _CONTAINERS and id(value) not in copies:
            copies[id(value)] = (value, value.copy())
            queue.extend(value.values() if isinstance(value, dict) else value)
        elif type(value) is tuple:
            queue.extend(value)
    return list(copies.values())


def refill(container: Any, saved: Any) -> None:
    """Replaces the items of ``container`` by those of ``saved``, see :func:`contents_of`."""
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(saved)
    else:
        container.update(saved)
