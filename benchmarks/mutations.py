"""Changes every kind of file that autopar reads, at random, and reads it: an error that says so, or a correct load.

``python -m benchmarks.mutations [--count 10000] [--only TEXT]`` writes ``benchmarks/results/mutations.json``: for each
kind of file how many were refused, how many were read, and how many ended in an internal error (which is printed).
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar import checkpoint
from autopar.cli.model_config import load_config
from autopar.cluster.description import Cluster
from autopar.monitor import StepRecord
from autopar.plans.page.step_records import read_records
from autopar.plans.plan import Plan
from autopar.runtime.checkpoint.claim import CLAIM
from autopar.runtime.checkpoint.manifest import FileRecord, read_manifest
from autopar.runtime.faults.record import Record, from_json, letters_from_json, to_json
from autopar.trace.cache import cache as traces

RESULTS = Path(__file__).with_name("results")
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64,
}  # fmt: skip
Reader = Callable[[bytes], object]


def mutated(text: bytes, source: random.Random) -> bytes:
    """``text`` with some bytes changed, deleted, doubled or moved, and numbers replaced, at one to four places."""
    content = bytearray(text)
    for _ in range(source.randint(1, 4)):
        at, length = source.randrange(len(content) + 1), source.randint(1, 20)
        match source.randrange(5):
            case 0:
                content[at : at + 1] = bytes([source.randrange(256)])
            case 1:
                del content[at : at + length]
            case 2:
                content[at:at] = content[at : at + length]
            case 3:
                to = source.randrange(len(content) + 1)
                content[to : to + length] = content[at : at + length]
            case 4:
                digits = [place for place, byte in enumerate(content) if chr(byte).isdigit()]
                if digits:
                    place = source.choice(digits)
                    content[place : place + 1] = source.choice(
                        [b"-1", b"0", b"1e400", b"99999999999999999999", b"null"]
                    )
    return bytes(content)


def files(folder: Path) -> dict[str, tuple[bytes, Reader]]:
    """A file of each kind, and what reads one."""
    os.environ["AUTOPAR_CACHE"] = str(folder / "cache")
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 8)
    plan = autopar.plan(model, (2, 2), batch, loss_fn=lambda out: out.square().mean())
    (trace,) = (folder / "cache" / "traces").rglob("*.*")
    config, steps = folder / "config.json", folder / "steps.jsonl"

    def read_config(text: bytes) -> object:
        config.write_bytes(text)
        return load_config(config)

    def read_steps(text: bytes) -> object:
        steps.write_bytes(text)
        return read_records(steps)

    record = StepRecord(1, 2.5, 0.5, 0.4, 1000.0, 0.3, 1 << 30, 1 << 29, 1.0, None, (0.1, 0.2), 1)
    lines = "".join(json.dumps(replace(record, step=step).to_dict()) + "\n" for step in range(3))
    return {
        "plan, JSON": (plan.to_json().encode(), lambda text: _validated(Plan.from_json(text.decode()))),
        "plan, text": (plan.to_text().encode(), lambda text: _validated(Plan.from_text(text.decode()))),
        "cluster": (Cluster.get("dgx-h100").to_toml().encode(), lambda text: Cluster.from_toml(text.decode())),
        "configuration of a model": (json.dumps(CONFIG).encode(), read_config),
        "cached trace": (trace.read_bytes().partition(b"\n")[2], _trace),
        "record of steps": (lines.encode(), read_steps),
        "message of the watch": (to_json(Record()).encode(), lambda text: (from_json(text), letters_from_json(text))),
        **_checkpoint_files(folder / "checkpoints"),
    }


def _trace(text: bytes) -> None:
    """As the cache reads it, which traces again for whatever is raised."""
    if not traces._load("mutated", text.decode()):
        raise autopar.AutoparError("not used")


def _validated(plan: Plan) -> Plan:
    plan.validate()
    return plan


def _checkpoint_files(folder: Path) -> dict[str, tuple[bytes, Reader]]:
    """The files of a checkpoint, which is loaded whole. A changed hash of a file is what every change leads to, so the
    manifest is made anew for files other than itself."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    place = Path(checkpoint.save(folder, model, optimizer, step=1, extra={"a": (1, torch.ones(2))}))
    original = {path.name: path.read_bytes() for path in place.iterdir()}

    def reader(name: str) -> Reader:
        def read(text: bytes) -> object:
            (place / name).write_bytes(text)
            if name != "manifest.json":
                _sign(place, name, original["manifest.json"])
            try:
                return checkpoint.load(place, model, optimizer)
            finally:
                for each in (name, "manifest.json"):
                    (place / each).write_bytes(original[each])

        return read

    def read_claim(text: bytes) -> object:
        (folder / CLAIM).write_bytes(text)
        return checkpoint.save(folder, model, step=2)

    found = {f"checkpoint, {name}": (text, reader(name)) for name, text in original.items()}
    return {**found, "claim of a folder": ((folder / CLAIM).read_bytes(), read_claim)}


def _sign(place: Path, name: str, manifest: bytes) -> None:
    """Writes the manifest that a file's present content would have."""
    found = read_manifest(manifest)
    content = (place / name).read_bytes()
    record = FileRecord(name, len(content), hashlib.sha256(content).hexdigest())
    changed = replace(found, files={**found.files, name: record})
    (place / "manifest.json").write_text(changed.to_json())


def attempt(text: bytes, read: Reader) -> str:
    """What reading a changed file comes to: ``refused``, ``read``, or the internal error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(text)
    except (autopar.AutoparError, UnicodeDecodeError):
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "read"


def measure(count: int, only: str = "", seed: int = 0) -> dict[str, Mapping[str, Any]]:
    """The rows; internal errors with an example."""
    found: dict[str, Mapping[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        for kind, (text, read) in files(Path(name)).items():
            if only not in kind:
                continue
            if attempt(text, read) != "read":
                raise AssertionError(f"{kind}: {attempt(text, read)}, unchanged")
            source, outcomes, begin = random.Random(seed), collections.Counter[str](), time.perf_counter()
            outcomes.update(attempt(mutated(text, source), read) for _ in range(count))
            errors = {text: number for text, number in outcomes.items() if text not in ("refused", "read")}
            found[kind] = {
                "mutations": count,
                "refused": outcomes["refused"],
                "read": outcomes["read"],
                "internal_errors": sum(errors.values()),
                "seconds": round(time.perf_counter() - begin, 1),
            }
            print(f"{kind:32} {found[kind]}", *list(errors.items())[:5], sep="\n   ", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--only", default="", help="kinds with this text in their name")
    arguments, path = parser.parse_args(), RESULTS / "mutations.json"
    rows = json.loads(path.read_text()) if arguments.only else {}
    path.write_text(json.dumps({**rows, **measure(arguments.count, arguments.only)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
