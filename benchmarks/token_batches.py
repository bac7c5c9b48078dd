"""Global batches of random tokens, the same for whoever asks for a step's."""

from __future__ import annotations

import torch

ROWS, LENGTH, VOCABULARY = 16, 128, 2048


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of a step, int64 [rows, length]."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
