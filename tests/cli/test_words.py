"""What the words of a command line mean, and how results print; no planning needed."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from autopar.cli.arguments import load_target, parse_mesh, parse_pins
from autopar.cli.output import Output, jsonable
from autopar.errors import OptionsError
from autopar.ir.placements import StridedShard

MODEL_FILE = """
import torch

class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
    def forward(self, x):
        return (x * self.weight).sum()

def tuple_batch():
    return Own(), (torch.ones(2, 3),)

def mapping_batch():
    return Own(), {"x": torch.ones(2, 3)}

def one_tensor():
    return Own(), torch.ones(2, 3)

def only_model():
    return Own()

def three():
    return Own(), 1, 2

def broken():
    raise ZeroDivisionError("in the user's own function")

made = tuple_batch()
"""


@pytest.fixture
def model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"model_{abs(hash(tmp_path))}.py"
    path.write_text(MODEL_FILE)
    return path


@pytest.mark.parametrize(
    ("text", "mesh"), [("4", (4,)), ("2,2", (2, 2)), ("2x1x2", (2, 1, 2)), ("(8, 8)", (8, 8)), ("4,", (4,))]
)
def test_mesh(text: str, mesh: tuple[int, ...]) -> None:
    assert parse_mesh(text) == mesh


@pytest.mark.parametrize("text", ["", "0", "2,-1", "2,,2", "two", "2.5", "2;2"])
def test_no_mesh(text: str) -> None:
    with pytest.raises(OptionsError, match="outermost first"):
        parse_mesh(text)


def test_pins() -> None:
    assert parse_pins(["a.weight=S(0),R", "h.*= R,R "]) == {"a.weight": "S(0),R", "h.*": "R,R"}
    with pytest.raises(OptionsError, match="NAME=PLACEMENTS"):
        parse_pins(["a.weight"])
    with pytest.raises(OptionsError, match=r"pinned twice: to R and to S\(0\)"):
        parse_pins(["a=R", "a=S(0)"])


@pytest.mark.parametrize("attribute", ["tuple_batch", "one_tensor", "made"])
def test_target_in_a_file_positional(model_file: Path, attribute: str) -> None:
    model, batch = load_target(f"{model_file}:{attribute}")
    assert type(model).__name__ == "Own"
    assert isinstance(batch, tuple) and batch[0].shape == (2, 3)


def test_target_in_a_module_keyword(model_file: Path) -> None:
    model, batch = load_target(f"{model_file.stem}:mapping_batch")
    assert isinstance(model, nn.Module)
    assert isinstance(batch, dict) and batch["x"].shape == (2, 3)


def test_target_on_meta_takes_no_memory(model_file: Path) -> None:
    model, batch = load_target(f"{model_file}:tuple_batch", meta=True)
    assert {t.device.type for t in (*model.parameters(), *batch)} == {"meta"}


def test_models_of_a_file_travel_to_processes_that_cannot_import_it(model_file: Path) -> None:
    model, _ = load_target(f"{model_file}:tuple_batch")
    data = cloudpickle.dumps(model)
    assert model_file.stem.encode() not in pickle_globals(data)
    assert torch.equal(pickle.loads(data).weight, torch.ones(3))


def pickle_globals(data: bytes) -> bytes:
    """The names of modules that unpickling would import."""
    import pickletools

    previous: list[str] = []
    modules = []
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("SHORT_BINUNICODE", "BINUNICODE"):
            previous.append(str(argument))
        elif opcode.name == "STACK_GLOBAL":
            modules.append(previous[-2])
    return " ".join(modules).encode()


def test_a_file_named_like_a_module_does_not_replace_it(tmp_path: Path) -> None:
    import random

    path = tmp_path / "random.py"
    path.write_text(MODEL_FILE)
    load_target(f"{path}:tuple_batch")
    import random as again

    assert again is random


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("missing", r"has no 'missing'; it has Own, tuple_batch"),
        ("only_model", r"gave a Own, not \(model, batch\)"),
        ("three", r"gave \(Own, int, int\), not \(model, batch\)"),
    ],
)
def test_bad_attribute(model_file: Path, attribute: str, message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        load_target(f"{model_file}:{attribute}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere", "names no model"),
        (":f", "names no model"),
        ("nowhere.py:f", "there is no file 'nowhere.py'"),
        ("nowhere.at.all:f", "there is no module 'nowhere.at.all'"),
    ],
)
def test_bad_source(text: str, message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        load_target(text)


def test_errors_of_the_user_come_through(model_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="own function"):
        load_target(f"{model_file}:broken")
    (tmp_path / "needs_more.py").write_text("import surely_not_installed")
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        load_target("needs_more:f")


@dataclass(frozen=True)
class Nested:
    where: tuple[object, ...]
    ratio: float


def test_jsonable() -> None:
    value = {
        "a": Nested((Shard(0), Replicate(), Partial("sum"), StridedShard(1, 4)), math.inf),
        2: torch.ones(2),
    }
    value["set"] = frozenset({"y", "x"})
    value["types"] = [torch.float32, torch.device("cpu")]
    found = jsonable(value)
    assert json.loads(json.dumps(found, allow_nan=False)) == {
        "a": {"where": ["S(0)", "R", "P(sum)", "S(1/4)"], "ratio": None},
        "2": [1.0, 1.0],
        "set": ["x", "y"],
        "types": ["torch.float32", "cpu"],
    }


def test_output_is_text_or_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json=False).result("[bold] stays as it is\n", {"a": 1})
    assert capsys.readouterr().out == "[bold] stays as it is\n"
    Output(json=True).result("text", {"a": 1})
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_errors_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json=False).error("no such thing", "OptionsError")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "autopar: no such thing\n")
    Output(json=True).error("no such thing", "OptionsError")
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"error": "no such thing", "kind": "OptionsError"}
    assert captured.err == "autopar: no such thing\n"


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Output().progress("working"):
        pass
    assert capsys.readouterr() == ("", "")
