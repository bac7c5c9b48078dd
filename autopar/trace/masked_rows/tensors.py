"""Rows selected by values, as the model's code sees them while it is traced: a tensor with one row per selected place,
whose number is not known. Its data has all places, and the selection says which are selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from autopar.torch_internals.size_nodes import SizeNode, node_of, size_of
from autopar.torch_internals.tensors import wrapper_subclass

from .branches import Regions, SelectionError
from .mask_facts import Fact, Key, says_any


@dataclass(frozen=True, eq=False)
class Selection:
    """The places where ``mask`` [g0, g1, ...] is true, in lexicographic order. ``fact`` has the facts about it; two
    selections are the same if their keys and shapes are."""

    mask: Tensor
    fact: Fact
    regions: Regions

    @property
    def key(self) -> Key:
        return self.fact.key, self.mask.dim()

    def over(self, dims: Sequence[int]) -> Tensor:
        """The mask, with size 1 for the dims of the grid not in ``dims``: true where any place is selected."""
        reduced = [dim for dim in range(self.mask.dim()) if dim not in dims]
        return self.mask.any(reduced[0], keepdim=True) if len(reduced) == 1 else self._any(reduced)

    def _any(self, dims: list[int]) -> Tensor:
        mask = self.mask
        for dim in dims:
            mask = mask.any(dim, keepdim=True)
        return mask


class Rows(torch.Tensor):
    """Represents the tensor [before..., n, after...] of the selected rows, which are its dim ``pos``, by ``data``
    [before..., g0, g1, ..., after...]. The grid dim i has size 1 if the rows do not depend on it. ``coordinates``: the
    values are the coordinates of the places, in one dim of the grid or, along the last dim of the tensor, in
    several."""

    data_: Tensor
    selection: Selection
    pos: int
    coordinates: tuple[int, ...] | None
    sharing: list[None]

    @staticmethod
    def make(
        data: Tensor, selection: Selection, pos: int, coordinates: tuple[int, ...] | None = None,
        sharing: list[None] | None = None,
    ) -> Rows:  # fmt: skip
        rows: Rows = wrapper_subclass(Rows, (0,), data.dtype)
        rows.__dict__.update(
            data_=data,
            selection=selection,
            pos=pos,
            coordinates=coordinates,
            sharing=[] if sharing is None else sharing,
        )
        rows.__dict__["sharing"].append(None)
        return rows

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise SelectionError(
            f"{func} is called directly, not by a torch function, on rows selected by values, whose number is not known"
        )

    @property
    def grid(self) -> int:
        """The number of dims of the grid."""
        return self.__dict__["selection"].mask.dim()  # type: ignore[no-any-return]


class ExpertNumber(torch.Tensor):
    """The number of an expert: an integer that is known although it comes from a tensor. ``rank`` is 0 or 1."""

    number: int
    rank: int

    @staticmethod
    def make(number: int, rank: int) -> ExpertNumber:
        tensor: ExpertNumber = wrapper_subclass(ExpertNumber, (0,), torch.int64)
        tensor.__dict__.update(number=number, rank=rank)
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise SelectionError(f"{func} is called on the number of an expert")


class CountNode(SizeNode):
    """The number of selected rows: it may be passed on as a size and compared with zero, and nothing else."""

    def __init__(self, selection: Selection, truth: bool | None = None) -> None:
        self.selection, self.truth = selection, truth
        self.is_comparison = truth is not None

    def compared(self, name: str, other: Any) -> CountNode:
        truth = says_any(name, other)
        if truth is None:
            self.refuse()
        return CountNode(self.selection, truth)

    def decided(self) -> bool:
        truth = True if self.truth is None else self.truth
        return self.selection.regions.enter_branch(self.selection.fact.key, truth)

    def refuse(self) -> NoReturn:
        raise SelectionError(_UNKNOWN)


_UNKNOWN = (
    "the number of rows that values select is needed here, but a graph is captured without values: it may be passed "
    "on as a size and compared with zero; for a mean, divide the sum of the rows by mask.sum(), a tensor"
)


def count_of(selection: Selection) -> Any:
    """The number of rows, as a size."""
    return size_of(CountNode(selection))


def is_count(value: Any) -> bool:
    return isinstance(value, torch.SymInt) and isinstance(node_of(value), CountNode)
