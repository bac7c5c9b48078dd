"""What was found out is kept on disk: read back, distrusted, and never the cause of an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.helpers.custom_ops  # noqa: F401
from autopar.passes.probe import found_rules
from autopar.passes.probe.found_rules import KNOWN, found_strategies
from autopar.passes.probe.rule_cache import Finding, describe, file_of, load, store
from autopar.passes.rule_language.registry import OpCall
from tests.helpers.probing import call_of, texts

ASKED = call_of("probing.normed.default", torch.empty(8, 6))
SCHEMA = str(torch.ops.probing.normed.default._schema)
FOUND = {"S(0) -> S(0) S(0)"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    KNOWN.clear()
    yield tmp_path / "rules"
    KNOWN.clear()


def kept() -> tuple[Path, dict[str, Any]]:
    """The file of a first search, and what is in it."""
    assert texts(found_strategies(ASKED)) == FOUND
    KNOWN.clear()
    path = file_of(describe(ASKED, SCHEMA))
    return path, json.loads(path.read_text())


def no_search(call: OpCall, operation: Any) -> Finding:
    raise AssertionError("searched again")


def test_a_finding_is_read_back_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    _, data = kept()
    assert data["strategies"] == {"S(0) -> S(0) S(0)": "any shards"}
    assert data["op"] == "probing.normed.default" and data["cases"] > 100
    monkeypatch.setattr(found_rules, "_search", no_search)
    assert texts(found_strategies(ASKED)) == FOUND
    other = call_of("probing.normed.default", torch.empty(31, 5), size=3)
    assert texts(found_strategies(other)) == FOUND, "sizes do not matter"


def test_a_finding_that_is_no_longer_true_is_not_used() -> None:
    path, data = kept()
    data["strategies"]["S(1) -> S(1) P(sum)"] = "any shards"
    path.write_text(json.dumps(data))
    assert texts(found_strategies(ASKED)) == FOUND


GARBAGE = {
    "nothing": lambda data: "",
    "half of it": lambda data: json.dumps(data)[:-40],
    "binary": lambda data: "\x00\x01",
    "another torch": lambda data: json.dumps(data | {"torch": "1.0"}),
    "another autopar": lambda data: json.dumps(data | {"autopar": 0}),
    "no dict": lambda data: "[[]]",
    "no strategies": lambda data: json.dumps({k: v for k, v in data.items() if k != "strategies"}),
    "no placement": lambda data: json.dumps(data | {"strategies": {"X -> S(0) S(0)": "any shards"}}),
    "no such dim": lambda data: json.dumps(data | {"strategies": {"S(7) -> S(7) S(7)": "any shards"}}),
    "too few operands": lambda data: json.dumps(data | {"strategies": {"S(0) S(0) -> S(0)": "any shards"}}),
    "a list for a dict": lambda data: json.dumps(data | {"strategies": ["S(0)"]}),
    "nested too deep": lambda data: "[" * 100_000,
    "an unknown source": lambda data: json.dumps(data | {"source": "rumour"}),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_as_good_as_nothing(kind: str) -> None:
    description = describe(ASKED, SCHEMA)
    good = {**description, "source": "probed", "cases": 1, "strategies": {"S(0) -> S(0) S(0)": "any shards"}}
    path = file_of(description)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(good | {"integers": {}}))
    assert load(description, ASKED) is not None
    path.write_text(GARBAGE[kind](good | {"integers": {}}))
    assert load(description, ASKED) is None


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    assert texts(found_strategies(ASKED)) == FOUND


def test_readers_never_see_half_a_file(folder: Path) -> None:
    description = describe(ASKED, SCHEMA)
    kept()
    finding = load(description, ASKED)
    assert finding is not None

    def write_and_read(_: int) -> bool:
        store(description, finding)
        return load(description, ASKED) == finding

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write_and_read, range(200)))
    assert [path.suffix for path in folder.iterdir()] == [".json"]
