"""Products in fp8: their dtype, and which there are."""

from __future__ import annotations

import torch

# The dtype of fp8 products, and the number that their dims must be multiples of.
FP8, FP8_MULTIPLE = torch.float8_e4m3fn, 16


def are_cast(*dims: int) -> bool:
    """Whether libraries multiply matrices of these dims in fp8."""
    return not any(dim % FP8_MULTIPLE for dim in dims)
