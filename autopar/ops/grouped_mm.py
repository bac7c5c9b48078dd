"""Grouped products on a device that holds some of the rows, or the matrices of some of the groups.

``ends`` [E] says at which row of the whole tensor each group ends; ``row`` is the first row held here, ``group`` the
first group.

======================================  ====================================================
``autopar.grouped_rows``                each row times the matrix of its group
``autopar.grouped_inner``               for each group the product over its rows
``autopar.grouped_backward``            gradients of what ``grouped_rows`` multiplies
======================================  ====================================================
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def _groups(ends: Tensor, row: int, rows: int, group: int, groups: int) -> Iterator[tuple[int, int, int]]:
    """Yields ``(group, first row, last row + 1)``, in local numbers, for each local group that has local rows."""
    bounds = [min(max(int(bound) - row, 0), rows) for bound in (0, *ends.tolist())]
    for index in range(groups):
        first, last = bounds[group + index], bounds[group + index + 1]
        if first < last:
            yield index, first, last


def grouped_rows(x: Tensor, matrices: Tensor, ends: Tensor, row: int, group: int) -> Tensor:
    """``x`` [s, K], ``matrices`` [e, K, N] -> [s, N]; zero for rows of groups that are not here."""
    out = x.new_zeros(x.shape[0], matrices.shape[2])
    for index, first, last in _groups(ends, row, x.shape[0], group, matrices.shape[0]):
        torch.mm(x[first:last], matrices[index], out=out[first:last])
    return out


def grouped_inner(x: Tensor, y: Tensor, ends: Tensor, row: int, group: int, groups: int) -> Tensor:
    """``x`` [M, s], ``y`` [s, N] -> [groups, M, N]."""
    out = x.new_zeros(groups, x.shape[0], y.shape[1])
    for index, first, last in _groups(ends, row, y.shape[0], group, groups):
        torch.mm(x[:, first:last], y[first:last], out=out[index])
    return out


def grouped_backward(
    x: Tensor, matrices: Tensor, ends: Tensor, grad: Tensor, row: int, group: int
) -> tuple[Tensor, Tensor]:
    """Gradients of ``x`` and ``matrices``, given that of ``grouped_rows(x, matrices, ...)``."""
    grad_x = grouped_rows(grad, matrices.transpose(1, 2), ends, row, group)
    return grad_x, grouped_inner(x.t(), grad, ends, row, group, matrices.shape[0])
