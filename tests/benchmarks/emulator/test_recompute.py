"""What torch's selective checkpoints by operation compute again; how context ranks share causal attention; what ZeRO-3
gathers, and what travels beside computing."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch

from autopar.cluster.description import Cluster
from autopar.cost import collective_seconds
from autopar.cost.overlap import TAKEN
from autopar.layout import Layout
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.price import Priced
from benchmarks.emulator.sections.section import Section
from benchmarks.published_models import build
from benchmarks.published_shape import Shape
from benchmarks.recipes import Recipe
from benchmarks.recipes.section import of_recipe
from tests.helpers.marks import slow_but
from tests.helpers.recipes import layout_of

H100 = Cluster.get("dgx-h100")
SHAPE = Shape(2, 1024, 8, 2, 128, 4096, gated=True, vocab=1024, seq=4096, flash=True)


@cache
def model(shape: Shape = SHAPE) -> LayoutModel:
    ids = torch.empty(8, shape.seq, dtype=torch.long, device="meta")
    return LayoutModel.of(build(shape), (ids, ids))


def test_attention_and_every_other_product_are_kept() -> None:
    """Of seven products in order (query, key, value, output, gate or up, up or gate, down) four are kept."""
    layers = list(map(of_recipe, model().sections(Recipe(), H100).layers))
    again = {name: model().price(layout_of(recompute=name), H100).parts["again"] for name in ("operations", "full")}
    assert again["full"] == pytest.approx(8 * sum(layer.forward.compute for layer in layers))
    assert again["operations"] == pytest.approx(8 * sum(layer.forward.compute - layer.kept.compute for layer in layers))
    assert 0.1 * again["full"] < again["operations"] < 0.6 * again["full"]


def test_what_is_kept_is_held() -> None:
    held = [
        model().price(layout_of(recompute=name), H100).held[0].activations for name in ("full", "operations", "none")
    ]
    assert held == sorted(held) and len(set(held)) == 3
    # The attention's result and its sums, and of query, value, gate or up, and down each result, in bf16.
    layer = of_recipe(model().sections(Recipe(), H100).layers[0])
    made = 4096 * (1024 + 1024 + 256 + 4096 + 1024) * 2
    assert layer.saved_kept == pytest.approx(made, rel=0.05)


def test_what_only_products_in_fp8_take_again_is_kept_in_fp8() -> None:
    """Of every layer the two norms' results and the activation's; all else is read by other kernels too."""
    bf16, fp8 = (model().sections(layout_of(precision=precision), H100).layers[0] for precision in ("bf16", "fp8"))
    halved = SHAPE.seq * (2 * SHAPE.hidden + SHAPE.ffn)
    assert bf16.saved - fp8.saved == halved == bf16.saved_rematerialised - fp8.saved_rematerialised


def test_what_elementwise_operations_make_is_made_again() -> None:
    """Of every layer the two norms' results and the activation's, in bf16: from the norms' inputs and two products."""
    layer = model().sections(Layout(), H100).layers[0]
    tokens = SHAPE.seq * 2
    assert layer.saved_rematerialised == tokens * (2 * SHAPE.hidden + SHAPE.ffn)
    moved = tokens * (2 * 2 * SHAPE.hidden + 3 * SHAPE.ffn)
    started = 3 * H100.device.launch_seconds
    assert layer.rematerialised.total == pytest.approx(moved / H100.device.memory_bandwidth + started, rel=0.1)
    none, light, full = (model().price(layout_of(recompute=name), H100) for name in ("none", "elementwise", "full"))
    assert none.predicted.step_seconds < light.predicted.step_seconds < full.predicted.step_seconds
    assert full.held[0].activations < light.held[0].activations < none.held[0].activations


@pytest.mark.slow
@pytest.mark.parametrize("changes", slow_but([{"upcast": True}], [{"upcast": True}, {"dropout": True}]))
def test_what_is_inside_attention_is_dropped_once(changes: dict[str, bool]) -> None:
    """Scores written out are kept several times over: as scores, in another precision, dropped out."""
    written = replace(SHAPE, flash=False, kv_heads=SHAPE.heads, seq=1024, **changes)
    names = ("full", "elementwise", "selective", "none")
    held = [model(written).price(layout_of(recompute=name), H100).held[0].activations for name in names]
    assert held == sorted(held) and len(set(held)) == 4
    layer = model(written).sections(Layout(), H100).layers[0]
    assert layer.saved_inside + layer.saved_rematerialised < layer.saved


@pytest.mark.slow
def test_an_early_and_a_late_piece_are_as_long_on_every_context_rank() -> None:
    """One key head a tensor rank: queries are divided. Of n ranks the last attends to (2 n - 1) / n as much as the
    mean."""
    shape = Shape(2, 1024, 8, 1, 128, 512, gated=True, vocab=1024, seq=32768, flash=True)
    even, late = (
        model(shape).sections(Recipe(context=4, context_load_balancing=balanced), H100).layers[0].forward.compute
        for balanced in (True, False)
    )
    attention = 4 * 8 * 128 * 32768 * 32768 / 2 / 4
    device = H100.device
    rate = 989e12 * device.sustained * device.attention_efficiency / (1 + device.attention_width / 128)
    assert late - even == pytest.approx((7 / 4 - 1) * attention / rate, rel=0.01)


def gathered(together: bool, layers_only: bool = False) -> float:
    """Seconds of gathering all weights over 64 ranks once."""
    sections = model().sections(Layout(data=64, zero=3), H100)
    found = 0.0
    for section in (section for section in sections.every if section.is_layer or not layers_only):
        sizes = [weight.elements * weight.itemsize for weight in section.weights]
        found += sum(
            collective_seconds(H100, (64, 1, 1), "all_gather", (0,), size)
            for size in ([sum(sizes)] if together else sizes)
        )
    return found


def sharded(**named: object) -> Priced:
    return model().price(layout_of(data=64, zero=3, **named), H100, 64)


def test_weights_gathered_one_by_one_are_as_many_collectives() -> None:
    """In forward and in backward, and once more in layers that are computed again."""
    for recompute, more in (("none", 0.0), ("full", gathered(False, layers_only=True))):
        layer, tensor = (
            sharded(gathers=gathers, recompute=recompute, overlap=()).predicted.step_seconds
            for gathers in ("layer", "tensor")
        )
        assert tensor - layer == pytest.approx(2 * (gathered(False) - gathered(True)) + more)


def test_of_named_modules_only_their_weights_are_gathered_again() -> None:
    """A gain of every layer's norm."""
    steps = [
        sharded(gathers=gathers, recomputed=("*.norm1",), overlap=()).predicted.step_seconds
        for gathers in ("tensor", "layer")
    ]
    gains = SHAPE.layers * collective_seconds(H100, (64, 1, 1), "all_gather", (0,), SHAPE.hidden * 2)
    assert steps[0] - steps[1] == pytest.approx(2 * (gathered(False) - gathered(True)) + gains)


def test_what_is_elementwise_gathers_the_weights_of_norms_again() -> None:
    """Two gains of every layer; attention in one kernel has no insides that would be computed again."""
    for recompute, gains in (("elementwise", 2), ("selective", 0)):
        tensor, layer = (
            sharded(gathers=gathers, recompute=recompute, overlap=()).predicted.step_seconds
            for gathers in ("tensor", "layer")
        )
        again = gains * SHAPE.layers * collective_seconds(H100, (64, 1, 1), "all_gather", (0,), SHAPE.hidden * 2)
        assert tensor - layer == pytest.approx(2 * (gathered(False) - gathered(True)) + again)


@pytest.mark.slow
def test_what_travels_takes_a_share_of_the_processors() -> None:
    """Where computing takes longer than every gather beside it, it is slowed down by a share of what travels."""
    long = Shape(2, 1024, 8, 2, 128, 4096, gated=True, vocab=1024, seq=32768, flash=True)
    hidden = model(long).price(Recipe(data=8, zero=3, overlap=("weight",)), H100, 8)
    apart = model(long).price(Recipe(data=8, zero=3, overlap=()), H100, 8)
    update = apart.parts["update"]
    computing = sum(apart.parts[name] for name in ("forward", "backward"))
    travelling = apart.predicted.step_seconds - computing - update
    assert 0 < travelling < computing / 2
    assert hidden.predicted.step_seconds == pytest.approx(computing + update + TAKEN * travelling, rel=0.01)


def test_what_named_modules_make_is_computed_again_from_what_comes_in() -> None:
    """Of gate and up both results are dropped, and of the activation; what comes in, the norm's result, stays. Their
    products run once more, with no gathers on one device."""
    plain, again = (model().sections(Recipe(recomputed=globs), H100).layers[0] for globs in ((), ("*.mlp",)))
    dropped = SHAPE.seq * 3 * SHAPE.ffn * 2
    assert (plain.saved_again, again.saved_again, plain.saved - again.saved) == (0, dropped, dropped)
    assert plain.backward == again.backward and plain.forward == again.forward
    steps = [model().price(Recipe(recomputed=globs), H100) for globs in ((), ("*.mlp",))]
    longer = steps[1].predicted.step_seconds - steps[0].predicted.step_seconds
    assert longer == pytest.approx(2 * 8 * again.again.compute)
    assert steps[1].parts["again"] == pytest.approx(longer)
    held = [one.held[0] for one in steps]
    assert held[0].activations - held[1].activations == 2 * dropped
    assert held[1].working - held[0].working == dropped


class Plain(torch.nn.Module):
    """Layers of modules that have no operations of their own."""

    def __init__(self) -> None:
        super().__init__()
        parts = (torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(*copy.deepcopy(parts)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@cache
def plain_layers() -> LayoutModel:
    return LayoutModel.of(Plain(), (torch.empty(32, 64),))


def sections_of_plain(*globs: str) -> list[Section]:
    layout = Recipe(microbatch=32, precision="fp32", recomputed=globs)
    return list(plain_layers().sections(layout, H100).every[1:-1])


def test_what_is_made_again_needs_what_was_not_kept() -> None:
    """The activation alone: the product's result, kept for nothing else, is kept then."""
    plain, again = (sections_of_plain(*globs)[1] for globs in ((), ("layers.*.1",)))
    assert again.saved_again == 32 * 256 * 4
    assert plain.saved == again.saved
    assert 0 < again.again.compute < plain.forward.compute


def test_all_parts_of_a_named_module_are_computed_again() -> None:
    """Of a layer only what it hands on is kept, whether it has operations of its own or only its parts do."""
    for globs in (("layers.?",), ("layers",), ("layers.*",)):
        for layer in sections_of_plain(*globs):
            assert (layer.saved, layer.saved_again) == (32 * 64 * 4, 32 * 256 * 4)


def test_what_a_caller_holds_is_held_though_it_is_computed_again() -> None:
    """The norm's result, which gate takes."""
    held, both, again = (
        model().sections(Recipe(retained_inputs=holds, recomputed=globs), H100).layers[0].saved
        for holds, globs in ((("*.mlp.gate",), ()), (("*.mlp.gate",), ("*.norm2",)), ((), ("*.norm2",)))
    )
    assert held == both == again + SHAPE.seq * SHAPE.hidden * 2


def test_what_is_kept_to_compute_again_is_held_already() -> None:
    """Of ``Tanh`` the product before it, whose result nothing else keeps."""
    saved = []
    for holds in ((), ("layers.*.1",)):
        layout = Recipe(microbatch=32, precision="fp32", recomputed=("layers.*.1",), retained_inputs=holds)
        saved.append([section.saved for section in plain_layers().sections(layout, H100).layers])
    assert saved[0] == saved[1] == [(32 * 256 + 32 * 64) * 4] * len(saved[0])


def test_a_norm_computed_again_is_as_one_of_all_that_is_elementwise() -> None:
    norms = model().sections(Recipe(recomputed=("*.norm1", "*.norm2")), H100).layers[0]
    plain = model().sections(Layout(), H100).layers[0]
    assert plain.saved - norms.saved == 2 * SHAPE.seq * SHAPE.hidden * 2


def test_tensor_ranks_gather_again_for_what_they_compute_again() -> None:
    layout = Recipe(tensor=2, sequence_parallel=True, recomputed=("*.mlp",))
    section = model().sections(layout, H100).layers[0]
    assert section.again.communicate > 0


def test_layers_computed_again_keep_what_they_hand_on() -> None:
    """Each by itself, as ``recompute="full"`` has it, but for the last product, whose result nothing reads."""
    deep = model(replace(SHAPE, layers=6))
    full, layers, every = (
        deep.price(layout_of(**named), H100)  # type: ignore[arg-type]
        for named in ({"recompute": "full"}, {"recomputed": ("layers.*",)}, {"recomputed": ("*",)})
    )
    assert layers.held[0].activations == full.held[0].activations <= every.held[0].activations
    assert 0.7 * full.parts["again"] < layers.parts["again"] < full.parts["again"]
