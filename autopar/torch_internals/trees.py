"""Nested tuples, lists and dicts as torch flattens them.

Relies on ``torch.utils._pytree``, whose functions ``torch.export`` uses (2.11). ``torch.utils.pytree``, the public
module of later versions, has no paths.
"""

from __future__ import annotations

from torch.utils._pytree import (
    TreeSpec,
    keystr,
    register_dataclass,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

__all__ = [
    "TreeSpec",
    "keystr",
    "register_dataclass",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
]
