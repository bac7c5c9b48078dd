"""Covariance without a look at values: torch warns of a sample too small by comparing a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

COVARIANCES = (torch.cov, torch.Tensor.cov)
CORRELATIONS = (torch.corrcoef, torch.Tensor.corrcoef)


def covariance(x: Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Tensor:
    """``torch.cov``: of variables in rows, observations in columns. With weights it is torch's own, which looks at
    them; so it is for what torch refuses."""
    if fweights is not None or aweights is not None or x.dim() > 2:
        return torch.cov(x, correction=correction, fweights=fweights, aweights=aweights)
    rows = (x if x.dim() == 2 else x.reshape(1, -1)).to(x.dtype if _is_inexact(x) else torch.get_default_dtype())
    count = rows.shape[1]
    centred = rows - rows.mean(1, keepdim=True)
    return (centred @ centred.mT.conj() / max(count - correction, 0)).squeeze()


def correlation(x: Tensor) -> Tensor:
    """``torch.corrcoef``."""
    found = covariance(x)
    if not found.dim():
        return found / found
    deviation = found.diagonal().real.sqrt() if found.is_complex() else found.diagonal().sqrt()
    found = found / deviation.unsqueeze(1) / deviation.unsqueeze(0)
    if found.is_complex():
        return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1))
    return found.clamp(-1, 1)


def _is_inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
