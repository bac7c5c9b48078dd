"""DiLoCo, its fragments and its exchanges beside steps, against replicas in one process."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from autopar import DiLoCo, LocalSGD
from autopar.runtime.averaging.pending import Pending
from tests.runtime.averaging.training import Exchange, Tied, assert_same, batches, simulated, trained

OUTER = {
    "default": (None, partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)),
    "adam": (partial(torch.optim.Adam, lr=0.05), partial(torch.optim.Adam, lr=0.05)),
}


def names_of_fragments(fragments: int) -> list[list[str]]:
    """The parameters in their order, cut where the middle of a parameter falls into the next part."""
    sizes = {name: parameter.numel() for name, parameter in Tied().named_parameters()}
    total, before = sum(sizes.values()), 0
    members: list[list[str]] = [[] for _ in range(fragments)]
    for name, size in sizes.items():
        members[int((before + size / 2) / total * fragments)].append(name)
        before += size
    return members


def outer_steps(every: int, fragments: int, delay: int, mix: float, make: Any) -> Exchange:
    """Streaming DiLoCo, algorithm 2 of Douillard et al. 2025."""
    anchors = {name: parameter.detach().clone() for name, parameter in made_parameters().items()}
    outer = make(list(anchors.values()))
    sent: dict[int, tuple[int, dict[str, torch.Tensor]]] = {}

    def exchange(models: list[nn.Module], step: int) -> None:
        parameters = [dict(model.named_parameters()) for model in models]
        for number, names in enumerate(names_of_fragments(fragments)):
            if number in sent and step == sent[number][0] + delay:
                arrive(number, parameters)
            if step % every == number * every // fragments:
                mean = {n: torch.stack([anchors[n] - own[n] for own in parameters]).mean(0) for n in names}
                sent[number] = step, mean
                if delay == 0:
                    arrive(number, parameters)

    def arrive(number: int, parameters: list[dict[str, nn.Parameter]]) -> None:
        _, mean = sent.pop(number)
        for name, gradient in mean.items():
            anchors[name].grad = gradient
        outer.step()
        outer.zero_grad()
        for name in mean:
            for own in parameters:
                own[name].copy_(mix * own[name] + (1 - mix) * anchors[name])

    return exchange


def made_parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return dict(Tied().named_parameters())


@pytest.mark.parametrize(
    "mesh, options",
    [
        ((2,), {}),
        pytest.param((2, 2), {"pins": {"middle.weight": "S(0)"}, "mesh_search": False}, marks=pytest.mark.slow),
        pytest.param((2, 2), {"zero": 3}, marks=pytest.mark.slow),
        pytest.param((2, 2), {"stages": 2, "microbatches": 1}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("outer", OUTER)
def test_outer_steps(mesh: tuple[int, ...], options: dict[str, Any], outer: str) -> None:
    given, reference = OUTER[outer]
    found = trained(DiLoCo(every=3, outer=given), mesh, data := batches(10), **options)
    assert_same(found, simulated(outer_steps(3, 1, 0, 0.0, reference), mesh[0], data))


@pytest.mark.parametrize(
    "replicas, fragments, delay, mix",
    [(2, 2, 0, None), (2, 3, 2, None), pytest.param(4, 4, 3, 0.25, marks=pytest.mark.slow)],
)
def test_fragments_arrive_while_replicas_step(replicas: int, fragments: int, delay: int, mix: float | None) -> None:
    sync = DiLoCo(every=4, fragments=fragments, delay=delay, mix=mix)
    found = trained(sync, (replicas,), data := batches(14, rows=2 * replicas + 3))
    kept = mix if mix is not None else 0.5 * (delay > 0)
    expected = simulated(outer_steps(4, fragments, delay, kept, OUTER["default"][1]), replicas, data)
    assert_same(found, expected)


def test_local_sgd_beside_steps_is_an_outer_step_of_one() -> None:
    found = trained(LocalSGD(every=3, delay=1), (2,), data := batches(10))
    assert_same(found, simulated(outer_steps(3, 1, 1, 0.5, partial(torch.optim.SGD, lr=1.0)), 2, data))


@pytest.mark.slow
def test_staleness_ends_in_the_same_place_on_every_replica() -> None:
    """Exchanges that are never there early are waited for at their last step, as with a delay."""
    late = partial(patch.object, Pending, "is_done", return_value=False)
    found = trained(LocalSGD(every=4, staleness=3, mix=0.0), (2,), data := batches(13), meanwhile=late)
    expected = simulated(outer_steps(4, 1, 3, 0.0, partial(torch.optim.SGD, lr=1.0)), 2, data)
    assert_same(found, expected)
