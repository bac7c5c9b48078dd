"""The versions of the modules that wrote a state, which torch keeps beside its values and copies of these lose."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

__all__ = ["with_versions"]


def with_versions(values: Mapping[str, Any], state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """``values`` with the versions of ``state``, by which a module knows what it wrote itself, from what an older one
    did. Relies on their home (2.11)."""
    result = OrderedDict(values)
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        result._metadata = versions  # type: ignore[attr-defined]
    return result
