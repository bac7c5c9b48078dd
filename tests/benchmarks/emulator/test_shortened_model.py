"""Models made short: whatever they do with their layers, the price is that of all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cluster.description import Cluster
from autopar.errors import TraceError
from autopar.layout import Layout
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.precision import computed_in
from benchmarks.emulator.price import Priced
from benchmarks.emulator.sections.shortened_model import Depth, shortened, traced_short
from benchmarks.emulator.step.chunks import cut_into_chunks
from tests.helpers.marks import slow_but

DEPTH, WIDTH = 5, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Turned(Block):
    def forward(self, x: Tensor, mask: Tensor, table: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x * table + mask), None


class Stack(nn.Module):
    """``run(self, x)`` says how ``layers`` are used."""

    def __init__(self, layers: nn.Module, run: Callable[[Stack, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.run = layers, run
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x).square().mean()


def in_turn(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = torch.relu(layer(x))
    return x


def by_index(model: Stack, x: Tensor) -> Tensor:
    for number in range(DEPTH):
        x = model.layers[number](x)
    return x


def zipped(model: Stack, x: Tensor) -> Tensor:
    for layer, scale in zip(model.layers, model.scales, strict=True):
        x = layer(x) * scale
    return x


def gated(model: Stack, x: Tensor) -> Tensor:
    for layer, scale in zip(model.layers, model.scales, strict=True):
        x = x + torch.tanh(layer(x)) * scale
    return x


def heads(model: Stack, x: Tensor) -> Tensor:
    """Losses of their own, all of the same form."""
    labels = torch.zeros(x.shape[0] * WIDTH, dtype=torch.long, device=x.device)
    losses = [F.cross_entropy(head(x).flatten(0, 1), labels) for head in model.layers]
    return torch.stack(losses)


def given_tables(model: Stack, x: Tensor) -> Tensor:
    """A mask of each layer's own and a table that all share."""
    table = torch.arange(WIDTH, device=x.device, dtype=x.dtype).cos()
    for number, layer in enumerate(model.layers):
        x, _ = layer(x, torch.full((WIDTH,), float(number), device=x.device), table=table)
    return x


def by_name(model: Stack, x: Tensor) -> Tensor:
    for _, layer in sorted(model.layers.items()):
        x = layer(x)
    return x


def side_by_side(model: Stack, x: Tensor) -> Tensor:
    return torch.cat([layer(x) for layer in model.layers], -1).reshape(-1, DEPTH * WIDTH)


def in_pairs(model: Stack, x: Tensor) -> Tensor:
    for first, second in model.layers:
        x = first(x) + second(x)
    return x


def backwards(model: Stack, x: Tensor) -> Tensor:
    for number in reversed(range(DEPTH)):
        x = model.layers[number](x)
    return x


def sequential(model: Stack, x: Tensor) -> Tensor:
    return model.layers(x)


def blocks() -> list[nn.Module]:
    return [Block() for _ in range(DEPTH)]


def strided(*strides: int) -> list[nn.Module]:
    return [nn.Conv1d(WIDTH, WIDTH, 3, stride, 1) for stride in strides]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Stack, Tensor], Tensor], int]] = {
    "by index": (lambda: nn.ModuleList(blocks()), by_index, 3),
    "zipped": (lambda: nn.ModuleList(blocks()), zipped, DEPTH),
    "gated": (lambda: nn.ModuleList(blocks()), gated, DEPTH),
    "heads": (lambda: nn.ModuleList(nn.Linear(WIDTH, 64) for _ in range(DEPTH)), heads, DEPTH),
    "given tables": (lambda: nn.ModuleList(Turned() for _ in range(DEPTH)), given_tables, 3),
    "by name": (lambda: nn.ModuleDict({f"l{i}": block for i, block in enumerate(blocks())}), by_name, 3),
    "side by side": (lambda: nn.ModuleList(blocks()), side_by_side, DEPTH),
    "in pairs": (lambda: nn.ModuleList(nn.ModuleList(blocks()[:2]) for _ in range(DEPTH)), in_pairs, DEPTH),
    "of strides": (lambda: nn.Sequential(*strided(1, 1, 1, 1, 2)), sequential, 4),
    "ever shorter": (lambda: nn.Sequential(*strided(2, 2, 2, 2)), sequential, 4),
    "backwards": (lambda: nn.ModuleList(blocks()), backwards, DEPTH),
    "one layer often": (lambda: nn.ModuleList([Block()] * DEPTH), in_turn, 0),
}


def priced(model: nn.Module) -> tuple[LayoutModel, Priced]:
    x = torch.empty(8, WIDTH, WIDTH, device="meta")
    found = LayoutModel.of(model, (x,))
    return found, found.price(Layout(microbatch=8, precision="fp32"), Cluster.get("dgx-a100-80gb"))


def every_layer(
    model: nn.Module, trace: Callable[[nn.Module], object], _needed: object, convert: Callable[[nn.Module], nn.Module]
) -> tuple[object, Depth]:
    with shortened(model, frozenset(path for path, _ in model.named_modules())) as depth:
        return trace(convert(model)), depth


# The others add how a model finds its layers: by name, in pairs, backwards.
QUICK = ("gated", "ever shorter", "of strides", "one layer often")


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_the_price_is_that_of_all_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, run, kept = CASES[name]
    with torch.device("meta"):
        model = Stack(layers(), run)
    before = list(model.named_modules())
    short, found = priced(model)
    assert len(short.depth.paths) == kept and list(model.named_modules()) == before
    assert not any(module._forward_hooks for module in model.modules())
    monkeypatch.setattr("benchmarks.emulator.model.traced_short", every_layer)
    _, whole = priced(model)
    assert found.flops == whole.flops
    for part in ("weight_bytes", "gradient_bytes", "optimizer_bytes"):
        assert getattr(found.predicted, part) == getattr(whole.predicted, part)
    for part in ("activation_bytes", "temporary_bytes"):
        assert getattr(found.predicted, part) == pytest.approx(getattr(whole.predicted, part), rel=0.05)
    assert found.predicted.compute_seconds == pytest.approx(whole.predicted.compute_seconds, rel=0.15)


def test_kept_layers_have_their_own_numbers() -> None:
    model = Stack(nn.ModuleList([*blocks()[:2], nn.Linear(WIDTH, WIDTH), *blocks()[:3]]), in_turn)
    with shortened(model) as depth:
        assert depth.paths == ["layers.0", "layers.1", "layers.2", "layers.3"] and depth.priced_as == (0, 1, 2, 3, 3, 3)
        assert [bool(list(layer.parameters())) for layer in model.layers] == [True, True, True, True, False, False]
    with shortened(model, frozenset({"layers"})) as depth:
        assert depth.is_whole and depth.priced_as == (0, 1, 2, 3, 4, 5)


def test_only_what_numbers_layers_may_differ() -> None:
    """An attribute that happens to be the number of a layer is none that numbers them."""
    layers = [Block() for _ in range(5)]
    for number, layer in enumerate(layers):
        layer.number, layer.heads = number + 7, 2
    with shortened(Stack(nn.ModuleList(layers), in_turn)) as depth:
        assert depth.priced_as == (0, 1, 2, 2, 2)
    layers[3].window = 3
    with shortened(Stack(nn.ModuleList(layers), in_turn)) as depth:
        assert depth.priced_as == (0, 1, 2, 3, 2)
    del layers[3].window
    layers[3].heads = 3
    with shortened(Stack(nn.ModuleList(layers), in_turn)) as depth:
        assert depth.priced_as == (0, 1, 2, 3, 2)


def test_a_model_that_cannot_be_traced_says_so_of_itself() -> None:
    """What is told is what the whole model does, not what became of it when it was made short."""

    def run(model: Stack, x: Tensor) -> Tensor:
        assert len(list(model.layers[3].parameters())) == 4, "no layer"
        raise ValueError("of the model")

    model = Stack(nn.ModuleList(blocks()), run)
    with pytest.raises(TraceError, match="of the model"):
        LayoutModel.of(model, (torch.empty(8, WIDTH, WIDTH),))
    with pytest.raises(TraceError, match="nothing"):
        traced_short(model, lambda _model: (_ for _ in ()).throw(TraceError("nothing")), lambda *_: ())


@pytest.mark.slow
def test_weights_that_do_not_learn_are_held_and_not_updated() -> None:
    with torch.device("meta"):
        model = Stack(nn.ModuleList(blocks()), in_turn)
    model.scales.requires_grad_(False)
    _, whole = priced(model)
    model.layers.requires_grad_(False)
    model.layers[-1].requires_grad_(True)
    _, frozen = priced(model)
    total, last = (sum(p.numel() for p in part.parameters()) for part in (model, model.layers[-1]))
    assert frozen.predicted.weight_bytes == whole.predicted.weight_bytes == 4 * total
    assert frozen.predicted.gradient_bytes == 4 * last
    assert frozen.predicted.optimizer_bytes == 8 * last
    assert frozen.parts["update"] < whole.parts["update"] and frozen.flops < whole.flops


def test_frozen_layers_that_nothing_trained_comes_before_are_not_computed_again() -> None:
    with torch.device("meta"):
        model = Stack(nn.ModuleList(blocks()), in_turn)
    model.requires_grad_(False)
    model.layers[-1].requires_grad_(True)
    traced = LayoutModel.of(model, (torch.empty(8, WIDTH, WIDTH),))
    none, full = (
        traced.price(Layout(microbatch=8, precision="fp32", recompute=kind), Cluster.get("dgx-a100-80gb"))
        for kind in ("none", "full")
    )
    assert 0 < full.parts["again"] < 2 / DEPTH * none.parts["forward"]
    assert full.predicted.activation_bytes <= none.predicted.activation_bytes


def test_a_model_may_be_a_list_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*blocks())
    x, layout, cluster = torch.empty(8, WIDTH, device="meta"), Layout(microbatch=8), Cluster.get("dgx-a100-80gb")
    short = LayoutModel.of(model, (x,), torch.mean)
    assert short.depth.paths == ["0", "1", "2"]
    monkeypatch.setattr("benchmarks.emulator.model.traced_short", every_layer)
    whole = LayoutModel.of(model, (x,), torch.mean).price(layout, cluster)
    assert short.price(layout, cluster).flops == whole.flops


class Halves(nn.Module):
    """Layers whose halves lie in lists of their own, called in turn, from the last layer on if ``is_turned``."""

    def __init__(self, is_turned: bool) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 64 * WIDTH) for _ in range(2 * DEPTH))
        self.downs = nn.ModuleList(nn.Linear(64 * WIDTH, WIDTH) for _ in range(2 * DEPTH))
        self.is_turned = is_turned

    def forward(self, x: Tensor) -> Tensor:
        numbers = range(2 * DEPTH)
        for number in reversed(numbers) if self.is_turned else numbers:
            x = self.downs[number](self.ups[number](x))
        return x.square().mean()


@pytest.mark.parametrize("is_turned", [False, True])
def test_layers_are_cut_in_the_order_in_which_they_run(is_turned: bool) -> None:
    """And not list by list: between an up-projection and its down-projection a wide value would cross."""
    with torch.device("meta"):
        model, x = Halves(is_turned), torch.empty(8, WIDTH)
    found = LayoutModel.of(model, (x,))
    places = [found.depth.paths[at] for at in found.depth.priced_as]
    assert [path.partition(".")[0] for path in places] == ["ups", "downs"] * (2 * DEPTH)
    sections = found.sections(Layout(precision="fp32"), Cluster.get("dgx-a100-80gb"))
    halves = cut_into_chunks(sections, Layout(pipeline=2, precision="fp32"))
    assert halves[1][0].entry == 4 * WIDTH
    if is_turned:
        assert places[0] == f"ups.{2 * DEPTH - 1}"
    assert LayoutModel.of(model, (x,)).depth == found.depth  # Also if the trace is known.


@pytest.mark.parametrize("is_turned", [False, True])
def test_only_what_is_traced_of_a_model_is_converted(is_turned: bool) -> None:
    with torch.device("meta"):
        model, x = Halves(is_turned), torch.empty(8, WIDTH)
    before = dict(model.named_parameters())
    whole = LayoutModel.of(*computed_in(model, (x,), torch.bfloat16))
    short = LayoutModel.of_call(model, (x,), {}, None, torch.bfloat16)
    assert {p.type.dtype for p in short.prepared.graph.placeholders("param")} == {torch.bfloat16}
    assert short.depth == whole.depth
    layout, cluster = Layout(pipeline=2, microbatch=8), Cluster.get("dgx-a100-80gb")
    assert short.price(layout, cluster) == whole.price(layout, cluster)
    assert dict(model.named_parameters()) == before
    assert not any(module._forward_hooks for module in model.modules())
