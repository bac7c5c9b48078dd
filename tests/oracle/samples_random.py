"""Samples of random draws: a part has the numbers of the whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .harness import Sample

_STATE = torch.tensor([1, 0, 2, 0])


def _samples() -> Iterator[Sample]:
    for name, dtype, rate in (
        ("uniform", torch.float64, ()),
        ("normal", torch.float64, ()),
        ("bernoulli", torch.float32, (0.3,)),
        ("bernoulli", torch.bool, (0.3,)),
        ("random_bits", torch.int64, ()),
    ):
        options = {"dtype": dtype, "device": torch.device("cpu"), "place": 2}
        yield Sample(f"autopar.{name}.default", (_STATE, (7, 12, 5), *rate), options)
        yield Sample(f"autopar.{name}.default", (_STATE, (12, 36), *rate), {**options, "samples": (1, 12)})


SAMPLES = list(_samples())
