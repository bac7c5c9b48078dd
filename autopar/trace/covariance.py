"""Covariance that reads no values: torch compares a tensor to warn of a sample that is too small."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

COVARIANCES = (torch.cov, torch.Tensor.cov)
CORRELATIONS = (torch.corrcoef, torch.Tensor.corrcoef)


def covariance(x: Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Tensor:
    """``torch.cov``, for variables in rows and observations in columns. With weights, whose values torch reads, and for
    what torch refuses, it calls torch's own."""
    if fweights is not None or aweights is not None or x.dim() > 2:
        return torch.cov(x, correction=correction, fweights=fweights, aweights=aweights)
    rows = (x if x.dim() == 2 else x.reshape(1, -1)).to(x.dtype if _is_inexact(x) else torch.get_default_dtype())
    count = rows.shape[1]
    centred = rows - rows.mean(1, keepdim=True)
    return (centred @ centred.mT.conj() / max(count - correction, 0)).squeeze()


def correlation(x: Tensor) -> Tensor:
    """``torch.corrcoef``."""
    matrix = covariance(x)
    if not matrix.dim():
        return matrix / matrix
    deviation = matrix.diagonal().real.sqrt() if matrix.is_complex() else matrix.diagonal().sqrt()
    matrix = matrix / deviation.unsqueeze(1) / deviation.unsqueeze(0)
    if matrix.is_complex():
        return torch.complex(matrix.real.clamp(-1, 1), matrix.imag.clamp(-1, 1))
    return matrix.clamp(-1, 1)


def _is_inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
