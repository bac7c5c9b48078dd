"""Models that draw: the same numbers whatever the plan, those of an eager model that draws from the same generator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.ir.graph import Graph
from autopar.ops.random import DRAWS
from autopar.passes.annotate.fold import fold_layers
from autopar.passes.normalise.standard import normalise
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.trace.random_draws import number_draws
from autopar.trace.tracer import trace
from tests.helpers.eager_draws import eager_draws
from tests.helpers.models import VOCABULARY, text
from tests.helpers.planning import CLUSTER, on, slow_devices
from tests.verification.test_models import tensor_parallel
from tests.zoo.check import check_assignments, check_plans, make_case


class Block(nn.Module):
    """Dropout on the stream and inside attention, noise on the sequence, all on shapes that divide nothing."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(w, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3)
        return F.dropout(self.out(y.transpose(1, 2).reshape(b, s, w)), 0.2)


class Noisy(nn.Module):
    """Layers under checkpoints, and most ways of drawing."""

    def __init__(self, width: int = 12, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.score = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x + checkpoint(layer, x, use_reentrant=index % 2 == 1)
        x = x + torch.randn_like(x) * 0.1 + torch.rand(x.shape[1:], dtype=x.dtype) * 0.1
        x = x * torch.bernoulli(torch.full_like(x, 0.9)) + F.rrelu(x, training=True)
        choice = F.gumbel_softmax(self.score(F.alpha_dropout(x, 0.1)), tau=0.5)
        picked = torch.multinomial(choice.detach().flatten(0, 1).softmax(-1), 1).view(x.shape[:-1])
        noise = torch.randint(0, 4, x.shape[:2])
        scored = choice.gather(-1, picked[..., None]).squeeze(-1) * (1 + noise)
        return scored.mean() + F.dropout1d(x, 0.5).pow(2).mean()


@pytest.mark.slow
def test_any_assignment_draws_what_an_eager_model_draws() -> None:
    """``make_case`` compares the graph with the eager model, the rest compares assignments with the graph."""
    torch.manual_seed(0)
    case = make_case(Noisy(), (torch.randn(6, 7, 12),))
    for mesh in ((3,), (2, 2)):
        check_assignments(case, mesh, range(2))
    plans = check_plans(case, (2, 2), ("compute",))
    drawn = [node for node in case.graph.nodes if node.op in DRAWS]
    assert len(drawn) >= 11
    sharded = [n for n in drawn if any(str(p) != "R" for p in plans["compute"].strategies[n.name].outputs[0])]
    assert len(sharded) >= 7, [str(node.op) for node in drawn]


def test_draws_are_numbered_and_know_their_samples() -> None:
    graph = number_draws(
        Graph.from_text("""
        graph(b=4)
        %x: f32[b, 6] = input("x")
        %s: i64[4] = autopar.random_state.default()
        %u: f32[3, 2*b] = autopar.uniform.default(%s, [3, 2*b], dtype=torch.float32)
        %t: i64[4] = autopar.random_state.default()
        %v: f32[3, 2] = autopar.uniform.default(%t, [3, 2], dtype=torch.float32)
        return output "0" = %u
        return output "1" = %v
        """)
    )
    assert graph.to_text().splitlines() == [
        "graph(b=4)",
        '%random: i64[4] = random("random")',
        '%x: f32[b, 6] = input("x")',
        "%u: f32[3, 2*b] = autopar.uniform.default(%random, [3, 2*b], dtype=torch.float32, place=0, samples=[1, 6])",
        "%v: f32[3, 2] = autopar.uniform.default(%random, [3, 2], dtype=torch.float32, place=1)",
        'return output "0" = %u',
        'return output "1" = %v',
    ]
    assert Graph.from_text(graph.to_text()).to_text() == graph.to_text()


def test_equal_layers_choose_alike_though_their_draws_differ() -> None:
    graph = fold_layers(normalise(trace(Noisy(layers=4), (torch.randn(6, 7, 12),), device="cpu").graph).at())
    drawn = [node.name for node in graph if node.op in DRAWS and node.module.startswith("layers.")]
    assert len(drawn) == 8
    assert len({graph.classes[name] for name in drawn}) == 2


def gpt2() -> nn.Module:
    """With dropout 0.1 on embeddings, attention and the residual stream."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_embd=24, n_head=4, vocab_size=VOCABULARY, n_positions=16, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


class Reader(nn.Module):
    """An embedding, a block and a tied head, with dropout all over."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCABULARY, 24), Block(24, 4)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embed(input_ids), 0.1)
        scores = (x + self.block(x)) @ self.embed.weight.T
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)


def reader() -> nn.Module:
    torch.manual_seed(0)
    return Reader()


def train(model: ParallelModule, evaluates: bool = True) -> list[float]:
    """Losses; an evaluation between two steps draws too, and must change nothing."""
    optimizer = model.optimizer(torch.optim.SGD, lr=0.5)
    losses = []
    for step in range(3):
        losses.append(float(model.step(**text(4, 8, seed=step))))
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and evaluates:
            with torch.no_grad():
                model(**text(4, 8))
    return losses


def plans(model: nn.Module) -> dict[str, dict[str, Any]]:
    sharded = replace(tensor_parallel(model, (2,)), seed=3)
    return {
        "best": {"cluster": CLUSTER, "options": autopar.Options(seed=3)},
        "fully sharded": {"cluster": CLUSTER, "options": autopar.Options(seed=3, zero=3)},
        "tensor parallel": {"cluster": CLUSTER, "options": sharded},
    }


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (reader, "tensor parallel"),
        *(pytest.param(gpt2, n, marks=pytest.mark.slow) for n in ("best", "fully sharded", "tensor parallel")),
    ],
)
def test_training_has_the_same_losses_under_every_plan(make: Callable[[], nn.Module], name: str) -> None:
    seeded = autopar.parallelize(make(), (1,), cluster=CLUSTER, options=autopar.Options(seed=3))
    alone = train(seeded, evaluates=make is gpt2)

    def work(rank: int, world: int) -> list[float]:
        torch.manual_seed(rank)
        return train(autopar.parallelize(make(), (world,), **plans(make())[name]), evaluates=name == "best")

    for losses in on(2, work, timeout=400.0):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_one_process_is_an_eager_model_that_draws_from_the_same_generator() -> None:
    reference, state = gpt2(), torch.tensor([3, 0, 0, 0])
    model = autopar.parallelize(gpt2(), (1,), cluster=CLUSTER, options=autopar.Options(seed=3))
    for step in range(2):
        state[2] = step
        model.zero_grad()
        reference.zero_grad()
        found = model.step(**text(4, 8))
        with eager_draws(state):
            expected = reference(**text(4, 8)).loss
        expected.backward()
        torch.testing.assert_close(found, expected.detach())
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad, msg=name)  # type: ignore[union-attr]


class Dropping(nn.Module):
    """Hardly more than what draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(x), 0.3, self.training).pow(2).mean()


def dropping(seed: int | None) -> tuple[ParallelModule, torch.Tensor]:
    """On one process, with an input; the same weights whatever the seed."""
    generator = torch.random.get_rng_state()
    torch.manual_seed(0)
    model, x = Dropping(), torch.randn(8, 12)
    torch.random.set_rng_state(generator)
    return autopar.parallelize(model, (1,), cluster=CLUSTER, options=autopar.Options(seed=seed)), x


def test_training_goes_on_where_it_was_saved() -> None:
    model, x = dropping(3)
    keys = set(model.state_dict())
    model.step(x)
    saved = model.random_state()
    assert saved == {"seed": 3, "steps": 1, "evaluations": 0}
    second = float(model.step(x))
    assert float(model.step(x)) != second
    model.set_random_state(saved)
    with torch.no_grad():  # Draws too, and changes nothing of what steps draw.
        model(x)
    assert model.random_state() == {**saved, "evaluations": 1}
    assert float(model.step(x)) == second
    assert set(model.state_dict()) == keys == set(Dropping().state_dict())


def test_the_seed_decides_and_without_one_that_of_torch() -> None:
    def first_loss(seed: int | None, torchs: int) -> float:
        torch.manual_seed(torchs)
        model, x = dropping(seed)
        return float(model.step(x))

    assert first_loss(None, 5) == first_loss(None, 5) != first_loss(None, 6)
    assert first_loss(3, 5) == first_loss(3, 6) != first_loss(4, 5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2), (4,)])
def test_verify_says_what_it_compares_with(mesh: tuple[int, ...]) -> None:
    report = autopar.verify(gpt2(), mesh, text(4, 8), cluster=slow_devices())
    assert report.ok and report.draws, str(report)
    assert "under autopar with the same seed (the model draws random numbers)" in str(report)
