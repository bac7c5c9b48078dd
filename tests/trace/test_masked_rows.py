"""Rows selected by values: experts given their tokens in the ways people write it, exactly and whatever is chosen; what
cannot be said so names its line."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import TraceError
from autopar.trace.tracer import trace
from tests.helpers.eager import assert_close
from tests.helpers.interpret import interpret
from tests.helpers.marks import slow_but
from tests.zoo.check import KINDS, check_plans, make_case
from tests.zoo.hugging_face import FAMILIES
from tests.zoo.models import ZOO

EXPERTS, WIDTH, BATCH = 4, 8, 3


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """The parts; how tokens get to experts is what the classes below differ in."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = torch.topk(self.gate(tokens).softmax(-1), 2)
        return (self.mix(tokens, weights, chosen) - tokens).square().mean()

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        raise NotImplementedError


class IndexAdd(Mixture):
    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == number)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, which, None])
        return out


class MaskAssignment(Mixture):
    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = chosen[:, 0] == number
            if mask.any():
                out[mask] = expert(x[mask]) * weights[mask, :1]
        return out


class Continues(Mixture):
    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in range(EXPERTS):
            rows = (chosen == number).any(-1).nonzero().squeeze(-1)
            if rows.shape[0] == 0:
                continue
            share = (weights * (chosen == number)).sum(-1)
            out.index_add_(0, rows, self.experts[number](x[rows]) * share[rows, None])
        return out


class AddsToRows(Mixture):
    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            out[rows] += weights[rows, which, None] * expert(x[rows])
        return out


class LoopOverHit(Mixture):
    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for hit in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            which, rows = torch.where(mask[hit].squeeze(0))
            out.index_add_(0, rows, self.experts[hit[0]](x[rows]) * weights[rows, which, None])
        return out


class Roots(Mixture):
    """Derivatives that are infinite where nothing is selected, and a sum over what is."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = expert(x)[:, 0] > 0.1 * number
            out[mask] = (expert(x)[mask][:, :1]).sqrt().log() * x[mask]
        return out + x[x[:, 0] > 0].sum(0)


MIXTURES = (IndexAdd, MaskAssignment, Continues, AddsToRows, LoopOverHit, Roots)


@pytest.mark.parametrize("kind", slow_but([LoopOverHit], MIXTURES))
def test_experts_compute_what_eager_does(kind: type[Mixture]) -> None:
    model = kind().double()
    traced = trace(model, (torch.randn(BATCH, 5, WIDTH).double(),), device="cpu")
    unused = 0
    for seed in range(4):
        torch.manual_seed(seed)
        tokens = 1 if seed == 3 else BATCH
        x = torch.randn(tokens, 5, WIDTH).double() * 0.9 + (torch.randn(WIDTH) * seed)
        graph = traced.graph.at(b=tokens) if traced.graph.symbols else traced.graph
        if tokens != BATCH and not traced.graph.symbols:
            continue
        reference = deepcopy(model)
        loss = reference(x)
        loss.backward()
        (name,) = (node.target for node in graph.placeholders("input"))
        found = interpret(graph, {**dict(model.named_parameters()), name: x})
        assert traced.signature.loss is not None
        assert_close("loss", found["output", traced.signature.loss], loss.detach(), 0.0)
        for path, parameter in reference.named_parameters():
            unused += parameter.grad is None
            if found["gradient", path] is None:
                assert parameter.grad is None
                continue
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert_close(path, found["gradient", path], expected, 1.0)
    # Where eager skips an expert its gradient is None, here it is zeros; where it does not skip, zeros too.
    assert unused or kind in (IndexAdd, Roots)


class Spread(Mixture):
    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        mask = chosen[:, 0] == 1
        return x + x[mask].std(0)  # the line


class Normalised(Mixture):
    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        mask = chosen[:, 0] == 1
        norm = nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=False)
        out = x.clone()
        out[mask] = norm(x[mask])  # the line
        return out


class CountBranch(Mixture):
    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        rows = torch.where(chosen[:, 0] == 1)[0]
        if rows.shape[0] > 2:  # the line
            x = x + 1
        return x


class AddsIfAny(Mixture):
    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        mask = chosen[:, 0] == 1
        if mask.any():  # the line
            x = x + 1
        return x


class WritesElsewhere(Mixture):
    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out, mask, other = x.clone(), chosen[:, 0] == 1, chosen[:, 0] == 2
        if mask.any():
            out[other] = 0.0  # the line
        return out


class Collects(Mixture):
    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        found, mask = [x], chosen[:, 0] == 1
        if mask.any():  # the line
            found.append(x + 1)
        return found[-1]


class TwoSelections(Mixture):
    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = x.clone()
        out[chosen[:, 0] == 1] = x[chosen[:, 0] == 2]  # the line
        return out


class Sorted(Mixture):
    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        mask, out = chosen[:, 0] == 1, x.clone()
        out[mask] = x[mask].flip(0)  # the line
        return out


class Ranged(Mixture):
    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        rows = torch.where(chosen[:, 0] == 1)[0]
        for _ in range(rows.shape[0]):  # the line
            x = x + 1
        return x


@pytest.mark.parametrize(
    "kind",
    (Spread, Normalised, CountBranch, AddsIfAny, WritesElsewhere, Collects, TwoSelections, Sorted, Ranged),
)
def test_what_depends_on_the_selection_names_its_line(kind: type[Mixture]) -> None:
    model = nn.Sequential(nn.Identity(), kind())
    with pytest.raises(TraceError, match=r"(?s)module '1.*test_masked_rows.py:\d+.*the line|module '1.*BatchNorm"):
        trace(model, (torch.randn(BATCH, 5, WIDTH),), device="cpu")


class Losses(nn.Module):
    """Losses of what a mask selects, reduced in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.classes = nn.Linear(WIDTH, 6), torch.linspace(0.5, 2, 6)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        y, mask = self.head(x), target > 1
        kept, wanted, weight = y[mask], target[mask], self.classes.to(x.dtype)
        signs = torch.stack([y, 2 * y], -1)
        losses = [
            kept.mean(), kept.square().mean(0).sum(), y[..., 0][mask].mean(), signs[mask].mean((0, 2)).square().sum(),
            F.mse_loss(kept, x[mask][:, :6]), F.l1_loss(kept, x[mask][:, :6], reduction="sum"),
            F.huber_loss(y[:, 2:][mask[:, 2:]], x[:, 2:, :6][mask[:, 2:]]),
            F.smooth_l1_loss(kept, x[mask][:, :6], reduction="none").square().mean(),
            nn.BCEWithLogitsLoss()(kept, (x[mask][:, :6] > 0).to(x.dtype)),
            F.kl_div(kept.log_softmax(-1), x[mask][:, :6].softmax(-1), reduction="batchmean"),
            F.cross_entropy(kept, wanted), F.cross_entropy(kept, wanted, weight=weight, label_smoothing=0.1),
            F.cross_entropy(kept, wanted, ignore_index=3), F.cross_entropy(kept, wanted, reduction="sum"),
            F.cross_entropy(kept, wanted, reduction="none").square().mean(),
            F.cross_entropy(kept, x[mask][:, :6].softmax(-1)), F.nll_loss(kept.log_softmax(-1), wanted, weight=weight),
        ]  # fmt: skip
        each = torch.stack(losses)
        return (each * torch.arange(1, len(losses) + 1)).sum(), each.detach()


@pytest.mark.slow
def test_losses_of_selected_rows() -> None:
    model = Losses().double()
    x, target = torch.randn(6, 5, WIDTH).double(), torch.randint(0, 6, (6, 5))
    traced = trace(model, (x, target), device="cpu")
    graph = traced.graph.at(b=6) if traced.graph.symbols else traced.graph
    loss, each = model(x, target)
    loss.backward()
    inputs = dict(zip(traced.signature.input_names, (x, target), strict=True))
    found = interpret(graph, {**dict(model.named_parameters()), **inputs})
    torch.testing.assert_close(found["output", "1"], each)
    for path, parameter in model.named_parameters():
        torch.testing.assert_close(found["gradient", path], parameter.grad)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "kinds"), [((2,), ("zero", "compute")), ((2, 2), KINDS)], ids=str)
def test_a_mixture_of_experts_under_any_plan(mesh: tuple[int, ...], kinds: tuple[str, ...]) -> None:
    check_plans(make_case(LoopOverHit(), (torch.randn(6, 5, WIDTH),)), mesh, kinds)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("switch_transformers",))
def test_models_of_transformers_under_any_plan(name: str) -> None:
    assert name in FAMILIES
    check_plans(make_case(*ZOO[name]()), (2, 2))
