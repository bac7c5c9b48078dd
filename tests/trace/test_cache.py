"""A kept trace equals a fresh one, and anything that a trace follows from makes another."""

from __future__ import annotations

import dataclasses
import importlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.content.feed import Unkeyable
from autopar.content.objects import Contents
from autopar.ir.graph import Graph, GraphError
from autopar.trace.cache import cache as trace_cache
from autopar.trace.cache import entry as trace_entry
from autopar.trace.cache.cache import traced_once
from autopar.trace.cache.entry import FIELDS, differences
from autopar.trace.cache.key import trace_key
from autopar.trace.capture import Request
from autopar.trace.lengths import Length
from autopar.trace.tracer import Traced, request_for, traced_request
from tests.helpers.marks import slow_but

SCALE = 2.0
ACTIVATIONS = {"relu": torch.relu, "gelu": F.gelu}


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


@dataclasses.dataclass
class Config:
    activation: str = "relu"
    sizes: tuple[int, ...] = (4, 8)


class Model(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.config = Config()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.drop = nn.Dropout(0.5)
        self.table = torch.arange(4.0)
        self.register_buffer("count", torch.zeros(()))
        self.names = ["a"]
        self.hook: Callable[[torch.Tensor], torch.Tensor] = helper

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor | float]:
        for layer in self.layers:
            x = ACTIVATIONS[self.config.activation](layer(x)) + self.table
        x = self.drop(self.norm(self.hook(x)))
        self.count.add_(1)
        return {"loss": (x * scale).square().mean(), "scale": scale}

    def describe(self) -> float:
        """Not called by forward, so that it may read the clock."""
        return time.time() + random.random()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return tmp_path / "traces"


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Request]]:
    """What was really traced."""
    asked: list[Request] = []

    def counted(request: Request) -> Traced:
        asked.append(request)
        return traced_request(request)

    monkeypatch.setattr(trace_cache, "traced_request", counted)
    yield asked


def _request(model: nn.Module | None = None, *args: Any, **options: Any) -> Request:
    return request_for(
        model or Model(), args or (torch.ones(8, 4),), options.pop("kwargs", {}), device="cpu", **options
    )


def test_one_trace_serves_equal_models_in_this_process_and_the_next(traces: list[Request]) -> None:
    fresh = traced_once(_request())
    again = traced_once(second := _request())
    trace_cache.forget()  # as in the next run
    kept = traced_once(third := _request())
    assert len(traces) == 1
    for found, request in ((again, second), (kept, third)):
        assert differences(found, traced_request(request)) == []
        assert found.graph.constants.keys() == fresh.graph.constants.keys()
        held = [t for t in found.graph.constants.values() if t is request.model.table]
        assert len(held) == 1, "constants are tensors of the model at hand"
    assert kept.graph.symbols == (("b", 8),)
    third.model.drop.p = 0.25
    assert "model.drop.p was 0.5" in (kept.reads.changed(third.model) or "")
    assert again.reads.changed(second.model) is None


def test_a_trace_with_open_lengths_serves_all_for_which_it_holds(traces: list[Request]) -> None:
    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.sin() if x.shape[1] < 12 else x.cos()).sum()

    for length in (8, 10, 16, 14):
        trace_cache.forget()
        request = _request(Rows(), torch.ones(4, length), lengths=(Length("0", 1, "l0"),))
        assert traced_once(request).fixed({"l0": length}) is not None
    assert [request.call.leaves[0].shape[1] for request in traces] == [8, 16]


@pytest.mark.parametrize("damage", slow_but([b"garbage"], [b"", b"garbage", b"{}"]))
def test_damaged_traces_are_made_anew(traces: list[Request], folder: Path, damage: bytes) -> None:
    traced_once(_request())
    (file,) = folder.iterdir()
    trace_cache.forget()
    if damage == b"{}":  # whole, but no trace
        trace_cache.write("traces", file.stem, "{}")
    else:
        file.write_bytes(damage)
    traced_once(_request())
    trace_cache.forget()
    traced_once(_request())
    assert len(traces) == 2


def _hook(module: nn.Module, *_: Any) -> None:
    """A forward hook."""


def _mutations() -> dict[str, Callable[[Model], object]]:
    def frozen(m: Model) -> object:
        return m.norm.weight.requires_grad_(False)

    def tied(m: Model) -> object:
        m.layers[1].weight = m.layers[0].weight
        return None

    def closure(m: Model) -> object:
        factor = 3.0
        m.hook = lambda x: x * factor
        return None

    def other_closure(m: Model) -> object:
        factor = 4.0
        m.hook = lambda x: x * factor
        return None

    return {
        "an attribute": lambda m: setattr(m.drop, "p", 0.25),
        "an attribute of a library's module": lambda m: setattr(m.norm, "eps", 1e-3),
        "a new attribute": lambda m: setattr(m, "extra", 1),
        "its type": lambda m: setattr(m, "extra", 1.0),
        "an object": lambda m: setattr(m.config, "activation", "gelu"),
        "a list": lambda m: m.names.append("b"),
        "a constant": lambda m: m.table.add_(1),
        "its dtype": lambda m: setattr(m, "table", m.table.double()),
        "a parameter's dtype": lambda m: m.norm.double(),
        "its shape": lambda m: setattr(m.layers[0], "bias", nn.Parameter(torch.ones(1))),
        "no bias": lambda m: setattr(m.layers[0], "bias", None),
        "frozen": frozen,
        "tied": tied,
        "a buffer": lambda m: m.register_buffer("another", torch.ones(2)),
        "not persistent": lambda m: m._non_persistent_buffers_set.add("count"),
        "a module": lambda m: setattr(m, "drop", nn.Identity()),
        "its mode": lambda m: m.drop.eval(),
        "a function": lambda m: setattr(m, "hook", torch.neg),
        "a lambda": closure,
        "what it encloses": other_closure,
        "a forward hook": lambda m: m.norm.register_forward_hook(_hook),
        "order": lambda m: (
            m._modules.move_to_end("layers")
            if hasattr(m._modules, "move_to_end")
            else m._modules.update(layers=m._modules.pop("layers"))
        ),
    }


@pytest.mark.slow
def test_everything_about_a_model_counts() -> None:
    keys = {"": trace_key(_request())}
    assert trace_key(_request()) == keys[""]
    for name, mutate in _mutations().items():
        model = Model()
        mutate(model)
        keys[name] = trace_key(_request(model))
    assert len(set(keys.values())) == len(keys)


def test_values_of_parameters_and_buffers_do_not_count() -> None:
    model = Model()
    before = trace_key(_request(model))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    assert trace_key(_request(model)) == before


def test_everything_about_a_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = 1.0

    def loss(output: dict[str, torch.Tensor], power: int = 2) -> torch.Tensor:
        return output["loss"] * weight

    def keyed(function: Callable[..., Any]) -> str:
        return trace_key(_request(loss_fn=function))

    x = torch.ones(8, 4)
    keys = {
        "": trace_key(_request()),
        "batch": trace_key(_request(None, torch.ones(6, 4))),
        "dtype": trace_key(_request(None, x.double())),
        "input gradient": trace_key(_request(None, torch.ones(8, 4, requires_grad=True))),
        "a keyword": trace_key(_request(None, x, 1.0)),
        "its name": trace_key(_request(None, x, kwargs={"scale": 1.0})),
        "its value": trace_key(_request(None, x, kwargs={"scale": 2.0})),
        "its type": trace_key(_request(None, x, kwargs={"scale": 2})),
        "mode": trace_key(_request(training=False)),
        "grad": trace_key(_request(grad=False)),
        "differentiate": trace_key(_request(differentiate="all")),
        "precision": trace_key(_request(autocast=torch.bfloat16)),
        "loss": keyed(loss),
        "another loss": keyed(lambda output: output["loss"]),
    }
    weight = 2.0
    keys["what it encloses"] = keyed(loss)
    loss.__defaults__ = (3,)
    keys["its defaults"] = keyed(loss)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    keys["a global"] = trace_key(_request())
    monkeypatch.setitem(ACTIVATIONS, "relu", F.silu)
    keys["a global dict"] = trace_key(_request())
    monkeypatch.setattr(F, "layer_norm", lambda *args, **kwargs: args[0])
    keys["a function of torch"] = trace_key(_request())
    with torch.autocast("cpu", torch.bfloat16):
        keys["autocast around"] = trace_key(_request())
    monkeypatch.setattr(Model, "forward", lambda self, x: {"loss": x.mean()})
    keys["a method"] = trace_key(_request())
    assert len(set(keys.values())) == len(keys)


_HELPER = "import torch\ndef act(x):\n    return torch.{name}(x)\n"


def test_a_helper_file_that_is_edited_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "a_helper_of_the_user.py"

    def load(name: str) -> ModuleType:
        file.write_text(_HELPER.format(name=name))
        sys.modules.pop(file.stem, None)
        importlib.invalidate_caches()
        return importlib.import_module(file.stem)

    def key(module: ModuleType, attach: bool) -> str:
        model = Model()
        if attach:
            model.hook = module.act
        return trace_key(_request(model))

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    relu = load("relu")
    keys = [key(relu, True), key(relu, False)]
    tanh = load("tanh")
    keys += [key(tanh, True), key(tanh, False)]
    sys.modules.pop(file.stem)
    assert len(set(keys)) == 4, "that it is loaded counts, in case it is used in a way that nobody sees"


class Clock(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x).mean()

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * (time.time() % 2)


class Reader(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import os

        return x.mean() * float(os.environ.get("SCALE", "1"))


class Holder(nn.Module):
    def __init__(self, held: object) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean() if self.held is not None else x.sum()


@pytest.mark.parametrize(
    "model",
    [
        lambda: Clock(),
        lambda: Reader(),
        lambda: Holder(random.Random(0)),
        lambda: Holder(torch.Generator()),
        lambda: Holder(iter([1])),
        lambda: Holder({object()}),
        lambda: Holder(torch.ones(2, device="meta")),
        lambda: Holder(lambda x: x + random.random()),
        lambda: Holder(lambda x: x + hash("a")),
    ],
)
def test_what_cannot_be_told_is_not_kept(model: Callable[[], nn.Module], folder: Path) -> None:
    with pytest.raises(Unkeyable):
        contents = Contents()
        contents.feed(made := model(), "model")
        contents.hexdigest()
    request = request_for(made, (torch.ones(4, 2, requires_grad=True),), device="cpu")
    traced_once(request)
    assert not folder.exists()


@dataclasses.dataclass(frozen=True)
class Frozen:
    name: str = "a"
    size: int = 4


def test_a_frozen_dataclass_is_told_by_its_fields() -> None:
    """Its hash is another in each process, but nothing of a trace follows from it."""
    keys = [trace_key(_request(Holder(held))) for held in (Frozen(), Frozen(), Frozen("b"), Frozen(size=5))]
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_every_field_of_a_trace_has_its_place() -> None:
    for kind, names in FIELDS.items():
        assert {field.name for field in dataclasses.fields(kind)} == names, f"say how {kind.__name__} is kept"


def test_a_trace_with_an_unknown_field_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, folder: Path, traces: list[Request]
) -> None:
    monkeypatch.setitem(trace_entry.FIELDS, Traced, FIELDS[Traced] - {"notes"})
    traced_once(_request())
    traced_once(_request())
    assert len(traces) == 2 and not folder.exists()


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps, self.weight = 0, nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return (x * self.weight * self.steps).mean()


def test_what_a_trace_warns_of_is_said_once_each_time(traces: list[Request]) -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match="changes steps when it is called") as said:
            traced_once(_request(Counter()))
        assert len(said) == 1
    assert len(traces) == 1


def test_graph_text_is_never_run() -> None:
    for text in ("().__class__", "__import__(1)", "[1][0]", "2 ** 10 ** 10", "open(1)"):
        with pytest.raises(GraphError):
            Graph.from_text(f'graph(b=8)\n%x: f32[4] = input("x")\n%y: f32[4] = aten.mul.Tensor(%x, -{text})\n')
