"""What a layout cannot divide is refused before anything is placed: which dim, by what, and what would do instead."""

from __future__ import annotations

import threading
from functools import cache

import pytest
import torch
import transformers as hf
from torch import nn

from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.layout import Layout, degrees
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.precision import computed_in
from benchmarks.recipes import Recipe

H100 = Cluster.get("dgx-h100")


def ids(size: int = 48, length: int = 48) -> torch.Tensor:
    return torch.empty(size, length, dtype=torch.long, device="meta")


@cache
def mixture() -> LayoutModel:
    """Mixtral with 20 heads, 4 of keys, and 8 experts."""
    config = hf.MixtralConfig(
        vocab_size=256, hidden_size=320, intermediate_size=128, num_hidden_layers=2, num_attention_heads=20,
        num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = hf.MixtralForCausalLM._from_config(config, dtype=torch.bfloat16)
    return LayoutModel.of(model, {"input_ids": ids(), "labels": ids()})


class Patches(nn.Module):
    """Images in patches, through one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 3, 1, 1))
        self.patches, self.head = nn.Conv2d(3, 64, 4, 4), nn.Linear(64, 8)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patches(torch.relu(images * self.scale)).flatten(2).transpose(1, 2)
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels)


class Steps(nn.Module):
    """Steps of so many features, or of words, each through the same layer."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, 64) if features else nn.Embedding(100, 64)
        self.last = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x))).square().mean()


class Masked(nn.Module):
    """Words through one layer, and the mean of those that a mask names, by a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(100, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.last((mask.unsqueeze(1) @ self.first(x)).squeeze(1)).square().mean()


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (
            Layout(tensor=8),
            r"self_attn has 20 heads, which do not divide among 8 tensor ranks; tensor=4 does$",
        ),
        (Layout(tensor=5), r"experts has 8 experts, which do not divide among 5 tensor ranks; tensor=4 does$"),
        (
            Layout(expert=3, data=3),
            r"8 experts, which do not divide among 3 ranks; expert=2 and expert=4 do, of 3 data",
        ),
        (Layout(expert=3, data=12), r"among 3 ranks; expert=2 and expert=4 do$"),
        (Layout(expert=8, data=8, tensor=2), r"8 experts / 2 tensor ranks, .* among 8 ranks; expert=4 does$"),
    ],
)
def test_what_does_not_divide_is_named_with_what_does(layout: Layout, said: str) -> None:
    with pytest.raises(OptionsError, match=said):
        mixture().price(layout, H100)


def test_degrees_that_are_advised_can_be_had() -> None:
    assert degrees("tensor", 20, 8) == "tensor=5 and tensor=10 do" and degrees("tensor", 1, 8) == "tensor=1 does"
    for layout in (Layout(tensor=4), Layout(expert=2, data=12), Layout(expert=4, data=8, tensor=2)):
        assert mixture().price(layout, H100).predicted.step_seconds > 0
    with pytest.raises(OptionsError, match="does not divide 4 x 1; expert=2 and expert=4 do, or take data=6"):
        mixture().price(Layout(expert=3, data=4), H100)


@pytest.mark.parametrize("context", [2, 3])
def test_channels_are_no_sequence(context: int) -> None:
    images = torch.empty(12, 3, 16, 16, device="meta")
    labels = torch.empty(12, dtype=torch.long, device="meta")
    with torch.device("meta"):
        model = LayoutModel.of(Patches().bfloat16(), (images.bfloat16(), labels))
    with pytest.raises(
        OptionsError, match=r"bf16\[1, 3, 16, 16\] is not one: patches \(aten.convolution.default\) sums over it"
    ):
        model.price(Layout(context=context), H100)


def test_features_are_no_sequence_but_steps_are() -> None:
    with torch.device("meta"):
        flat = LayoutModel.of(Steps(48).bfloat16(), (torch.empty(8, 48, dtype=torch.bfloat16),))
        steps = LayoutModel.of(Steps(48).bfloat16(), (torch.empty(8, 96, 48, dtype=torch.bfloat16),))
        words = LayoutModel.of(Steps(0).bfloat16(), (torch.empty(8, 96, dtype=torch.long),))
    with pytest.raises(OptionsError, match=r"context ranks divide a sequence, .* is not one: first .* sums over it"):
        flat.price(Layout(context=2), H100)
    for model in (steps, words):
        assert model.price(Layout(context=2), H100).predicted.step_seconds > 0
    with pytest.raises(OptionsError, match=r"sequence of 96 \(dim 1\), .* context=4 and context=6 do"):
        steps.price(Layout(context=5), H100)


def test_a_masked_mean_sums_over_a_sequence() -> None:
    mask = torch.empty(8, 96, dtype=torch.bfloat16, device="meta")
    with torch.device("meta"):
        model = LayoutModel.of(Masked().bfloat16(), (torch.empty(8, 96, dtype=torch.long), mask))
    assert model.price(Layout(context=2), H100).predicted.step_seconds > 0


def test_a_model_that_cannot_be_copied_is_priced_as_it_is_or_refused() -> None:
    model, inputs = Steps(32), (torch.empty(8, 16, 32),)
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(OptionsError, match=r"Steps must be priced in torch.bfloat16.*lock.*model.to\(torch.bfloat16\)"):
        computed_in(model, inputs, torch.bfloat16)
    assert LayoutModel.of(*computed_in(model, inputs, torch.float32)).price(Layout(precision="fp32"), H100).fits


def test_a_model_without_layers_has_no_stages() -> None:
    model = LayoutModel.of(Steps(32).bfloat16(), (torch.empty(8, 16, 32, dtype=torch.bfloat16),))
    with pytest.raises(OptionsError, match=r"the model has no layers to cut between.*take pipeline=1"):
        model.price(Layout(pipeline=2), H100)
    assert model.price(Recipe(pipeline=2, cuts="operations"), H100).fits


def test_products_without_a_rate_are_said_to_be_priced_as_the_slowest() -> None:
    model, v100 = LayoutModel.of(Steps(32), (torch.empty(8, 16, 32),)), Cluster.get("p3.16xlarge")
    note = "a V100-SXM2-16GB has no rate of products in bf16: they are priced as f64, its slowest"
    assert note in model.price(Layout(), v100).notes[0]
    assert not model.price(Layout(precision="fp16"), v100).notes


def test_fields_left_out_are_defaults_of_prices() -> None:
    """As a restriction of plans such a layout is possible, since what it leaves out is searched."""
    with pytest.raises(OptionsError, match="pipeline=1 has none"):
        mixture().price(Layout(interleave=2), H100)
