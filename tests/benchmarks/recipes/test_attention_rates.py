"""Rates of fused attention that another system's kernels have."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.sections.section import Section
from benchmarks.published_models import build
from benchmarks.published_shape import Shape
from benchmarks.recipes import Recipe

H100 = Cluster.get("dgx-h100")
# Every other layer attends to a window of 128 tokens.
SHAPE = Shape(2, 512, 8, 8, 64, 1024, gated=True, vocab=1024, seq=2048, flash=True, window=128, window_every=2)


@cache
def model() -> LayoutModel:
    ids = torch.empty(8, SHAPE.seq, dtype=torch.long, device="meta")
    return LayoutModel.of(build(SHAPE), (ids, ids))


def layers(*rates: str) -> list[Section]:
    """One with a window, and one without."""
    return list(model().sections(Recipe(microbatch=4, attention=rates), H100).layers[:2])


@pytest.mark.slow
def test_each_kind_and_phase_has_its_rate() -> None:
    usual = layers()
    masked, plain = (layers(rates) for rates in ("masked:0.1:0.05", "plain:1.0:0.5"))
    for found, changed, phases in ((masked, 0, ("forward", "backward")), (plain, 1, ("backward",))):
        for layer in (0, 1):
            for phase in ("forward", "backward"):
                slower = getattr(found[layer], phase).compute > 1.01 * getattr(usual[layer], phase).compute
                assert slower == (layer == changed and phase in phases)


def test_rates_are_relative_to_the_device_without_a_mask() -> None:
    """So those of the device's own kernel change nothing, and half of them takes longer."""
    own = H100.device.masked_attention
    for same, usual in zip(layers(f"masked:{own}:{own}"), layers(), strict=True):
        assert same.forward.compute == pytest.approx(usual.forward.compute)
    halved = layers(f"masked:{own / 2}:{own}")[0]
    assert halved.forward.compute > 1.01 * layers()[0].forward.compute
    assert halved.backward.compute == pytest.approx(layers()[0].backward.compute)


def test_rates_are_words() -> None:
    layout = Recipe(attention=("plain:1.0:0.5", "masked:0.3:0.4"))
    assert Recipe.parse(str(layout)) == layout
    assert (layout.attention_rates(False), layout.attention_rates(True)) == ((1.0, 0.5), (0.3, 0.4))
    assert dataclasses.replace(layout, attention=()).attention_rates(True) is None
    for word in ("masked:0.3", "causal:1:1", "masked:0:1", "masked:a:b"):
        with pytest.raises(OptionsError, match=r"write them as 'masked:0\.3:0\.4', forward and backward"):
            Recipe(attention=(word,))
    with pytest.raises(OptionsError, match=r"activation_gradient=0\.0.: not a positive number"):
        Recipe(activation_gradient=0.0)
