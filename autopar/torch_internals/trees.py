"""Nested tuples, lists and dicts as torch flattens them.

Relies on ``torch.utils._pytree``, whose functions ``torch.export`` uses (2.11). ``torch.utils.pytree``, the public
module of later versions, has no paths.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.utils._pytree import (
    MappingKey,
    TreeSpec,
    keystr,
    register_dataclass,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

__all__ = [
    "MappingKey",
    "ResidentKey",
    "TreeSpec",
    "keystr",
    "register_dataclass",
    "register_pytree_node",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
]


@dataclass(frozen=True)
class ResidentKey:
    """The key, among paths of a call's inputs, of a tensor that stays on the devices between calls, which change it in
    place: a key-value cache."""

    key: str

    def __str__(self) -> str:
        return f".{self.key}"
