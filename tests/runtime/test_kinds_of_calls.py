"""Calls that differ from the first have programs of their own, equal to one device, with parameters where they are."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import InfeasibleError
from autopar.runtime.module.parallel_module import ParallelModule
from tests.helpers.planning import on, slow_devices

WORDS, WIDTH = 11, 6
LABELS = F.cross_entropy
STAGED: dict[str, Any] = {"stages": 2, "microbatches": 2}


class Flagged(nn.Module):
    """A loss where labels are given, and everything that calls of it may vary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(WIDTH, WORDS)

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        scale: float = 1.0,
        bounded: bool = False,
    ) -> dict[str, torch.Tensor]:
        hidden = self.embed(ids)
        hidden = hidden + self.down(self.drop(self.up(hidden).relu()))
        hidden = hidden if mask is None else hidden * mask[..., None]
        logits = self.head(hidden.tanh() if bounded else hidden) * scale
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch(size: int = 8, length: int = 5) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (size, length))
    return {"ids": ids, "labels": torch.randint(0, WORDS, ids.shape)}


def pair(mesh: tuple[int, ...], **named: Any) -> tuple[ParallelModule, Flagged]:
    """A parallel model whose plan shards what it can, and the same on one device."""
    reference, loss_fn = Flagged(), named.pop("loss_fn", None)
    options = autopar.Options(mesh_search=False, **named)
    parallel = autopar.parallelize(
        copy.deepcopy(reference), mesh, cluster=slow_devices(), options=options, loss_fn=loss_fn
    )
    return parallel, reference


def check_gradients(model: ParallelModule, reference: nn.Module) -> None:
    found = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        given = found[name].grad
        if parameter.grad is None:
            assert given is None, name
        else:
            assert given is not None, name
            torch.testing.assert_close(model.full_tensor(given), parameter.grad, msg=lambda m, n=name: f"{n}: {m}")
    model.zero_grad(), reference.zero_grad()


def check_step(model: ParallelModule, reference: nn.Module, **inputs: Any) -> None:
    """Loss and every gradient of a step are those of one device."""
    loss = reference(**inputs)["loss"]
    loss.backward()
    torch.testing.assert_close(model.step(**inputs), loss.detach())
    check_gradients(model, reference)


def check_own_loss(model: ParallelModule, reference: nn.Module, **inputs: Any) -> None:
    """A loss that the user makes of the logits, with labels smoothed, has the gradients of one device."""
    losses = []
    for side in (model, reference):
        logits = side(**inputs)["logits"]
        losses.append(F.cross_entropy(logits.flatten(0, 1), inputs["ids"].flatten(), label_smoothing=0.1))
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1])
    check_gradients(model, reference)


def check_evaluation(model: ParallelModule, reference: nn.Module, **inputs: Any) -> None:
    model.eval(), reference.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs), reference(**inputs))
    model.train(), reference.train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "named"),
    [
        ((2,), {}),
        *(pytest.param(m, n, marks=pytest.mark.slow) for m, n in [((2, 2), {}), ((2,), STAGED), ((4,), {"zero": 3})]),
    ],
    ids=["2", "2x2", "stages", "zero3"],
)
def test_every_kind_of_call_after_an_evaluation(mesh: tuple[int, ...], named: dict[str, Any]) -> None:
    def work(rank: int, world: int) -> None:
        model, reference = pair(mesh, **named)
        given, mask = batch(), (torch.rand(8, 5) > 0.3).float()
        # A plan is one for training, and stages train by a loss of the model's.
        first = given if "stages" in named else {"ids": given["ids"]}
        check_evaluation(model, reference, **first)
        before = [p.placements for p in model.parameters()]  # type: ignore[attr-defined]
        for inputs in (
            given,
            {**given, "mask": mask},
            {**given, "scale": 0.5},
            {**given, "bounded": True},
            batch(8, 7),
            {**given, "ids": given["ids"].int()},
            given,
        ):
            check_step(model, reference, **inputs)
        for side in (model, reference):
            side.up.requires_grad_(False)
        check_step(model, reference, **given)
        for side in (model, reference):
            side.up.requires_grad_(True)
        check_step(model, reference, **given)
        check_evaluation(model, reference, ids=given["ids"][:3])
        assert [p.placements for p in model.parameters()] == before  # type: ignore[attr-defined]
        lines = [str(line) for line in model.programs()]
        assert len(lines) == 9 and "the input 'scale' was not given and is 0.5" in lines[3], lines
        assert sum(line.uses for line in model.programs()) == 11

    on(4 if mesh != (2,) else 2, work, timeout=500.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "named"),
    [
        ((2,), {}),
        *(
            pytest.param(m, n, marks=pytest.mark.slow)
            for m, n in [((4,), {}), ((2, 2), {}), ((2, 2), STAGED), ((1,), {"microbatches": 4})]
        ),
    ],
    ids=["2", "4", "2x2", "stages", "microbatches"],
)
def test_batches_of_any_size(mesh: tuple[int, ...], named: dict[str, Any]) -> None:
    def work(rank: int, world: int) -> None:
        model, reference = pair(mesh, **named)
        given = batch(16)
        check_step(model, reference, **given)
        for size in (6, 1, 3):
            check_step(model, reference, **{name: value[:size] for name, value in given.items()})
        check_evaluation(model, reference, ids=given["ids"][:5])

    on(math.prod(mesh), work, timeout=500.0)


@pytest.mark.slow
def test_a_given_plan_meets_an_evaluation_first_and_a_batch_too_large_is_an_error() -> None:
    named = {"cluster": slow_devices(), "options": autopar.Options(mesh_search=False)}
    torch.manual_seed(0)
    planned = autopar.plan(Flagged(), (2,), batch(), **named)

    def work(rank: int, world: int) -> None:
        reference, given = Flagged(), batch()
        model = autopar.parallelize(copy.deepcopy(reference), (2,), plan=planned, **named)
        check_evaluation(model, reference, ids=given["ids"])
        check_step(model, reference, **given)
        assert model.programs()[-1].planned
        limit = int(1.5 * planned.predicted.peak_bytes)
        model, reference = pair((2,), memory_limit=limit)
        check_step(model, reference, **given)
        with pytest.raises(InfeasibleError, match=rf"ids i64\[64, 50\].* more than the limit of {limit}"):
            model.step(**batch(64, 50))
        check_step(model, reference, **given)

    on(2, work, timeout=400.0)


class Compared(nn.Module):
    """Its inputs differ in rank, and come in another order by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(self.up(x).relu()).squeeze(-1), t)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"microbatches": 2}, pytest.param(STAGED, marks=pytest.mark.slow)], ids=["microbatches", "stages"]
)
def test_a_batch_in_another_form_under_microbatches(options: dict[str, Any]) -> None:
    x, t = torch.randn(4, 4), torch.randn(4)

    def forms(rank: int, world: int) -> list[float]:
        model = autopar.parallelize(Compared(), (2,), options=autopar.Options(**options))
        by_keyword, by_position = model.step(x, t=t), model.step(x, t)
        return [float(loss) for loss in (by_keyword, by_position, model.step(t=t, x=x))]

    for losses in on(2, forms):
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_one_batch_size_adds_a_parameter_where_another_adds_a_number() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.more = nn.Linear(6, 3), nn.Parameter(torch.randn(8, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x) + (self.more if x.shape[0] == 8 else 1)

    model = Sized()
    wanted = [model(torch.ones(rows, 6)).detach() for rows in (8, 5)]
    parallel = autopar.parallelize(model, (1,))
    for rows, value in zip((8, 5), wanted, strict=True):
        torch.testing.assert_close(parallel(torch.ones(rows, 6)).detach(), value)


def test_a_first_call_returns_more_under_microbatches_than_the_step_that_is_planned() -> None:
    """Its logits are a view that the loss alone, which is planned, does not take."""
    model, reference = pair((1,), microbatches=2)
    inputs = batch()
    for side in (model, reference):
        outputs = side(**inputs)
        (outputs["loss"] / 3).backward()
    torch.testing.assert_close(model(**inputs)["logits"], outputs["logits"])
    check_gradients(model, reference)
    check_step(model, reference, **inputs)
