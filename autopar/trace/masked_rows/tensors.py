"""Rows selected by values, as the model's code sees them while it is traced: a tensor with one row per selected place,
whose number is not known. In truth it holds all places, and the selection says which count.
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
    """The places where ``mask`` [g0, g1, ...] is true, in lexicographic order. ``fact`` says what is known of it; two
    selections are the same if their keys and shapes are."""

    mask: Tensor
    fact: Fact
    regions: Regions

    @property
    def key(self) -> Key:
        return self.fact.key, self.mask.dim()

    def over(self, dims: Sequence[int]) -> Tensor:
        """The mask, with size 1 for the dims of the grid not in ``dims``: true where any place is selected."""
        rest = [dim for dim in range(self.mask.dim()) if dim not in dims]
        return self.mask.any(rest[0], keepdim=True) if len(rest) == 1 else self._any(rest)

    def _any(self, rest: list[int]) -> Tensor:
        found = self.mask
        for dim in rest:
            found = found.any(dim, keepdim=True)
        return found


class Rows(torch.Tensor):
    """``data`` [before..., g0, g1, ..., after...] for the tensor [before..., n, after...] of the selected rows, which
    are its dim ``pos``. The grid dim i has size 1 where the rows do not depend on it. ``coordinates``: the values are
    the places themselves; of one dim of the grid, or, with the last dim of the tensor, of several."""

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
        made: Rows = wrapper_subclass(Rows, (0,), data.dtype)
        made.__dict__.update(
            data_=data,
            selection=selection,
            pos=pos,
            coordinates=coordinates,
            sharing=[] if sharing is None else sharing,
        )
        made.__dict__["sharing"].append(None)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise SelectionError(
            f"{func} is called, past torch's functions, on rows selected by values, whose number is not known"
        )

    @property
    def grid(self) -> int:
        """The number of dims of the grid."""
        return self.__dict__["selection"].mask.dim()  # type: ignore[no-any-return]


class Known(torch.Tensor):
    """A whole number that is known although it came from a tensor: the number of an expert. ``rank`` 0 or 1."""

    number: int
    rank: int

    @staticmethod
    def make(number: int, rank: int) -> Known:
        made: Known = wrapper_subclass(Known, (0,), torch.int64)
        made.__dict__.update(number=number, rank=rank)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise SelectionError(f"{func} is called on the number of an expert")


class CountNode(SizeNode):
    """The number of selected rows: it may be handed on as a size and compared with zero, and nothing else."""

    def __init__(self, selection: Selection, truth: bool | None = None) -> None:
        self.selection, self.truth = selection, truth
        self.is_comparison = truth is not None

    def compared(self, name: str, other: Any) -> CountNode:
        said = says_any(name, other)
        if said is None:
            self.refuse()
        return CountNode(self.selection, said)

    def decided(self) -> bool:
        truth = True if self.truth is None else self.truth
        return self.selection.regions.enter_branch(self.selection.fact.key, truth)

    def refuse(self) -> NoReturn:
        raise SelectionError(_UNKNOWN)


_UNKNOWN = (
    "the number of rows that values select is needed here, but a graph is captured without values: it may be given on "
    "as a size and compared with zero; for a mean, divide the sum of the rows by mask.sum(), a tensor"
)


def count_of(selection: Selection) -> Any:
    """The number of rows, as a size."""
    return size_of(CountNode(selection))


def is_count(value: Any) -> bool:
    return isinstance(value, torch.SymInt) and isinstance(node_of(value), CountNode)
