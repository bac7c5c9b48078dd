"""Collectives on single tensors, which torch 2.13 renamed: before, the new names do not exist; since, the old ones
warn. And how long collectives may take."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``all_gather_single`` (2.13), before ``all_gather_into_tensor`` (2.11)."""
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""``reduce_scatter_single`` (2.13), before ``reduce_scatter_tensor`` (2.11)."""


def world_timeout(backend: str = "") -> timedelta | None:
    """How long communication of the default group may take, as ``init_process_group(timeout=)`` set it, for a group of
    ``backend``: torch gives it to no further group. None if it is not known. Relies on ``_get_backend`` and
    ``options._timeout`` (2.11)."""
    found = []
    for kind in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError, ValueError):
            options: Any = dist.group.WORLD._get_backend(torch.device(kind)).options  # type: ignore[union-attr]
            found.append(options._timeout)
    if backend == "gloo" and (not found or found == [default_pg_nccl_timeout]):
        return default_pg_timeout  # Not set by anybody; NCCL's own default is shorter than gloo's.
    return max(found, default=None)
