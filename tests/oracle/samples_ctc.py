"""Losses of sequences of different lengths, some without any label, some impossible."""

from __future__ import annotations

import torch

from .harness import Sample
from .random_tensors import floats, integers


def _sample(batch: int, zero_infinity: bool) -> Sample:
    log_probs = (floats(9, batch, 5) * 2).log_softmax(-1)
    taken, told = torch.full((batch,), 9), integers(4, batch)
    taken[0], told[0] = 1, 3
    return Sample("autopar.ctc_loss.default", (log_probs, integers(5, batch, 4, low=1), taken, told, 0, zero_infinity))


SAMPLES = [_sample(4, True), _sample(7, True), _sample(6, False)]
