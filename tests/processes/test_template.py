"""Processes copied from the template: what of their starter they have, and what they share."""

from __future__ import annotations

import importlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextvars import Context, ContextVar
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import transformers
from torch import nn
from torch.fx.experimental import proxy_tensor
from torch.nn.utils import parametrizations, parametrize

from autopar.errors import WorkerError
from autopar.processes.imports import installed_modules
from autopar.processes.template import template
from autopar.runtime.launch import run_local
from autopar.torch_internals.hugging_face import records_outputs

HERE = torch.library.Library("template_tests", "DEF")
HERE.define("negated(Tensor x) -> Tensor")
HERE.impl("negated", lambda x: -x, "CompositeExplicitAutograd")


def one(work: Callable[[int, int], Any]) -> Any:
    """What ``work`` returns in a process of its own."""
    return run_local(work, 1, timeout=100, backend=None)[0]


@pytest.fixture
def default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def test_it_has_the_surroundings_of_its_starter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default_dtype: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_VARIABLE", "now")
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("module_of_now.py").write_text("VALUE = 5")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(random.randrange(1000))
    state = torch.get_rng_state()

    def work(rank: int, world: int) -> Any:
        value = __import__("module_of_now").VALUE
        return os.getcwd(), os.environ["SOME_VARIABLE"], value, torch.ones(1).dtype, torch.rand(3)

    *found, drawn = one(work)
    assert found == [str(tmp_path), "now", 5, torch.float64]
    torch.set_rng_state(state)
    assert torch.equal(drawn, torch.rand(3))


def test_it_has_the_operations_of_a_script() -> None:
    """Nobody can import the script: the functions are sent."""

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    doubled.__module__ = halved.__module__ = "__main__"
    made = torch.library.custom_op("template_tests::doubled", doubled, mutates_args=())
    made.register_autograd(lambda ctx, grad: 3 * grad)
    made.register_kernel("cpu")(halved)

    def work(rank: int, world: int) -> list[float]:
        x = torch.ones(1, requires_grad=True)
        y = torch.ops.template_tests.doubled(x)
        y.backward()
        assert x.grad is not None
        return [y.item(), x.grad.item()]

    assert one(work) == [0.5, 3.0]


def test_it_has_the_operations_of_modules() -> None:
    assert one(lambda rank, world: torch.ops.template_tests.negated(torch.ones(1)).item()) == -1


def test_it_has_no_thread_and_no_autograd_of_its_starter() -> None:
    """Autograd has run here, which copies of this process could then not do on a CUDA build."""
    torch.ones(1, requires_grad=True).sum().backward()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()

    def work(rank: int, world: int) -> tuple[int, float]:
        x = torch.ones(1, requires_grad=True)
        (3 * x).sum().backward()
        assert x.grad is not None
        return threading.active_count(), x.grad.item()

    try:
        assert one(work) == (1, 3.0)
    finally:
        stop.set()
        thread.join()


def test_what_cannot_be_sent_says_so() -> None:
    lock = threading.Lock()
    with pytest.raises(WorkerError, match=r"(?s)cannot be sent.*lock.*inside the function"):
        one(lambda rank, world: lock.locked())


class Scaled(nn.Module):
    """A layer of a user's own class, which counts what it has computed and is made from arguments."""

    def __new__(cls, width: int) -> Self:
        return super().__new__(cls)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.randn(5, width)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x @ self.weight


def test_layers_with_parametrized_weights_are_sent() -> None:
    """Torch refuses to pickle them. Two that share a layer share it afterwards too, and both compute the same."""
    scaled = parametrizations.weight_norm(Scaled(3))
    between = parametrizations.spectral_norm(nn.Linear(3, 5))
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(5, 5)), scaled, between, scaled).eval()
    x = torch.randn(4, 5)
    expected = model(x).detach()

    def work(rank: int, world: int) -> Any:
        found = model(x)
        found.sum().backward()
        gradients = {name: parameter.grad is not None for name, parameter in model.named_parameters()}
        same = model[1] is model[3]
        model[1].weight = torch.ones(5, 3)
        return found.detach(), gradients, same, scaled.calls, parametrize.is_parametrized(model[0])

    found, gradients, *others = one(work)
    assert torch.equal(found, expected) and others == [True, scaled.calls + 2, True]
    assert gradients == {name: True for name, _ in model.named_parameters()} and len(gradients) == 6


def test_hooks_of_libraries_collect_there_too() -> None:
    """That of transformers writes what a context variable of its module holds, which its model sets when called."""
    config = transformers.ConvNextConfig(hidden_sizes=[4, 8], depths=[1, 1], num_stages=2, out_features=["stage1"])
    model, x = transformers.ConvNextBackbone(config).eval(), torch.randn(1, 3, 32, 32)
    expected = model(x).feature_maps[0].detach()
    assert any(module._forward_hooks for module in model.modules())

    def work(rank: int, world: int) -> torch.Tensor:
        records_outputs(model)
        return model(x).feature_maps[0].detach()

    assert torch.equal(one(work), expected)


def test_context_variables_are_sent() -> None:
    """Those of an installed module as the module's, others with their default and the value that they have here."""
    unset: ContextVar[int] = ContextVar("unset")
    preset, given = ContextVar("preset", default=3), ContextVar("given", default=4)
    given.set(5)
    installed = proxy_tensor.ORIGINAL_ATEN

    def work(rank: int, world: int) -> Any:
        same = installed is importlib.import_module("torch.fx.experimental.proxy_tensor").ORIGINAL_ATEN
        return [unset.get(None), unset.name, preset.get(), given.get(), Context().run(given.get), same]

    assert one(work) == [None, "unset", 3, 5, 4, True]


def test_copies_of_copies_come_from_the_same_template() -> None:
    def work(rank: int, world: int) -> list[int]:
        return [os.getppid(), one(lambda rank, world: os.getppid())]

    process = template().process
    assert process is not None and one(work) == [process.pid, process.pid]


def test_a_template_that_died_is_replaced() -> None:
    first = template().process
    assert first is not None
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert one(lambda rank, world: rank) == 0
    assert template().process is not first


def test_only_installed_modules_are_imported_ahead() -> None:
    assert "hypothesis" not in installed_modules(["tests.processes.test_template"])
    found = installed_modules(["tests.processes.test_template", "__main__", "json.decoder"])
    assert {"json.decoder", "pytest", "torch"} <= set(found)
    assert not any(name.startswith("tests.") for name in found)
