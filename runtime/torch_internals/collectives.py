"""Collectives on single tensors, which torch 2.13 renamed: before, the new names do not exist; since, the old ones
warn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``all_gather_single`` (2.13), before ``all_gather_into_tensor`` (2.11)."""
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""``reduce_scatter_single`` (2.13), before ``reduce_scatter_tensor`` (2.11)."""
