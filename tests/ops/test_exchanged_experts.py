"""Experts by all-to-all: whatever the router chooses, what devices compute together is what one computes alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import autopar
from autopar.cluster.description import Cluster
from autopar.ops.exchanged_experts import EXCHANGES, Message, message_bytes, run_lockstep
from autopar.ops.experts import experts, experts_backward
from autopar.trace.moe_blocks import activation_text
from tests.zoo.check import compute_bound

from .test_experts import FAMILIES

WIDTH, HIDDEN, TOKENS = 6, 5, 12
ROUTERS = {
    "each to the next": lambda count, chosen: (torch.arange(TOKENS)[:, None] + torch.arange(chosen)) % count,
    "all to one device": lambda count, chosen: torch.arange(chosen).repeat(TOKENS, 1),
    "all to the last": lambda count, chosen: count - 1 - torch.arange(chosen).repeat(TOKENS, 1),
    "none at all": lambda count, chosen: torch.full((TOKENS, chosen), count),
}


def block(
    count: int, chosen: int, router: str, dtype: torch.dtype = torch.float64, width: int = WIDTH, hidden: int = HIDDEN
) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    act = activation_text(torch.nn.functional.silu, hidden, dtype)
    matrices = some(count, hidden, width), some(count, width, hidden), some(count, hidden), some(count, width)
    return some(TOKENS, width), ROUTERS[router](count, chosen), some(TOKENS, chosen), *matrices, act, count


def on_device(index: int, devices: int, operands: tuple[Any, ...]) -> list[Any]:
    """Tokens, ids, weights and matrices are all divided along dim 0."""
    return [each.chunk(devices)[index] if isinstance(each, Tensor) else each for each in operands]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(("devices", "count", "chosen"), [(2, 4, 1), (2, 2, 2), (4, 8, 4)])
def test_devices_together_compute_what_one_does(router: str, devices: int, count: int, chosen: int) -> None:
    operands = block(count, chosen, router)
    starts = range(0, count, count // devices)
    grad = operands[0].cos()
    parts = [on_device(index, devices, operands) for index in range(devices)]
    results = run_lockstep([EXCHANGES["exchanged_experts"](*part, starts) for part in parts])
    torch.testing.assert_close(torch.cat(results), experts(*operands, 0))
    name, grads = "exchanged_experts_backward", grad.chunk(devices)
    backward = run_lockstep([EXCHANGES[name](g, *part, starts) for g, part in zip(grads, parts, strict=True)])
    expected = experts_backward(grad, *operands, 0)
    for mine, whole in zip(zip(*backward, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(mine), whole)


@pytest.mark.parametrize("name", EXCHANGES)
def test_messages_have_the_bytes_that_are_priced(name: str) -> None:
    """Where every device gets as many rows."""
    operands = block(4, 2, "each to the next", torch.float32)
    first = (operands[0],) if name.endswith("backward") else ()
    parts = [on_device(index, 2, (*first, *operands)) for index in range(2)]
    sent: list[int] = []

    def counted(running: Any) -> Any:
        message: Message = next(running)
        while True:
            sent.append(message.rows.nbytes)
            try:
                message = running.send((yield message))
            except StopIteration as end:
                return end.value

    blocks = [EXCHANGES[name](*part, (0, 2)) for part in parts]
    run_lockstep([counted(blocks[0]), *blocks[1:]])
    assert tuple(sent) == message_bytes(name, parts[0], 2)


def computing_counts() -> Cluster:
    """Slow devices, and links that deliver at once and soon: the bytes decide how tokens meet experts."""
    fast = Cluster.get("dgx-a100-80gb")
    links = tuple(replace(link, latency=0.0, rates={}, bandwidth=1e9) for link in fast.links)
    return compute_bound(replace(fast, links=links, collective_seconds=0.0, algorithms=()))


def one_layer(chosen: int) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    settings = {**FAMILIES["mixtral"][1].to_dict(), "num_experts_per_tok": chosen, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    ids = torch.randint(3, 61, (8, 8), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "labels": ids}


def exchanging(plan: autopar.Plan) -> list[str]:
    return [name for name, strategy in plan.strategies.items() if strategy.local.startswith("autopar.exchanged_")]


def test_one_choice_of_four_devices_is_exchanged_and_its_price_is_a_line() -> None:
    """A gather would move all tokens to all devices: four times the rows."""
    model, batch = one_layer(1)
    plan = autopar.plan(model, (4,), batch, cluster=computing_counts(), options=autopar.Options(mesh_search=False))
    assert len(exchanging(plan)) == 2
    lines = [line for line in plan.lines if line.kind == "exchange"]
    assert [len(line.steps) for line in lines] == [3, 5]
    assert sum(line.seconds for line in plan.lines) == pytest.approx(plan.predicted.step_seconds)
    assert autopar.Plan.from_json(plan.to_json()).lines == plan.lines
    assert "exchange of rows" in str(plan)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "chosen"), [((2,), 1), ((4,), 2)])
def test_processes_that_exchange_agree_with_the_eager_model(mesh: tuple[int, ...], chosen: int) -> None:
    model, batch = one_layer(chosen)
    options = autopar.Options(mesh_search=False)
    report = autopar.verify(model, mesh, batch, options=options, cluster=computing_counts())
    assert report.ok, str(report)
    assert exchanging(report.plan)
