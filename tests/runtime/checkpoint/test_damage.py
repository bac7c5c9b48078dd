"""A checkpoint is complete and as it was written, or an error says what is wrong with it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from autopar import checkpoint
from autopar.errors import AutoparError, CheckpointError, WorkerError
from autopar.ir.placements import parse_placements, take_local
from autopar.ir.program import TensorSlot
from autopar.runtime import mesh_groups, run_local
from autopar.runtime.checkpoint import boxes, torch_storage
from autopar.runtime.checkpoint.find import WRITING
from autopar.runtime.checkpoint.index import read_index
from autopar.runtime.checkpoint.manifest import read_manifest
from autopar.runtime.checkpoint.save import _BEING_WRITTEN, _begin
from autopar.runtime.checkpoint.stores import LocalStore, store_of
from autopar.runtime.checkpoint.tree_json import from_json, to_json
from autopar.runtime.state.parameters import make_dtensor
from tests.helpers.planning import on


def plain(value: float = 0.0) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    with torch.no_grad():
        model.bias.fill_(value)
    return model


def saved(folder: Path, *steps: int) -> Path:
    """Checkpoints whose bias is the step; the newest one's folder."""
    for step in steps:
        path = checkpoint.save(folder, plain(step), step=step)
    return Path(path)


def loaded(folder: Path) -> tuple[int, float]:
    model = plain(-1.0)
    found = checkpoint.load(folder, model)
    return found.step, float(model.bias[0].detach())


def flip(file: Path, byte: int) -> None:
    content = bytearray(file.read_bytes())
    content[byte] ^= 0x10
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["rank-00000-000.safetensors", "index.json", "state.json"])
def test_a_changed_or_short_file_is_named_and_the_older_one_told(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, 1, 2)
    whole = (folder / name).read_bytes()
    flip(folder / name, len(whole) // 2)
    with pytest.raises(CheckpointError, match=rf"step-000002/{name} is damaged: its content"):
        loaded(tmp_path)
    (folder / name).write_bytes(whole[:-7])
    with pytest.raises(CheckpointError, match=rf"{name} is damaged: it has {len(whole) - 7} bytes, and {len(whole)}"):
        loaded(tmp_path)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        loaded(tmp_path)
    assert loaded(tmp_path / "step-000001") == (1, 1.0)


def test_the_newest_complete_one_is_found_whatever_the_names(tmp_path: Path) -> None:
    saved(tmp_path, 12, 9, 10)  # Begun again at step 8.
    (tmp_path / "step-000009").rename(tmp_path / "zzz")
    (tmp_path / "step-000011").mkdir()
    (tmp_path / ".writing-step-000012-x").mkdir()
    (tmp_path / "step-000013").write_text("a file")
    assert loaded(tmp_path) == (10, 10.0)
    flip(tmp_path / "step-000010" / "manifest.json", 40)
    with pytest.warns(UserWarning, match="step-000010 is left out"):
        assert loaded(tmp_path) == (9, 9.0)
    saved(tmp_path / "again", 3)
    saved(tmp_path / "again", 3)
    assert folders(tmp_path / "again") == {"step-000003"}, "the same step again replaces it"
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        loaded(tmp_path / "nowhere")


def test_the_newest_is_found_though_clocks_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after restarts on hosts whose clocks differ; and whatever a copy made of the files' times."""
    clock = time.time
    for step, hours in enumerate((0, 48, -48, 24, -1)):
        monkeypatch.setattr(time, "time", lambda hours=hours: clock() + 3600 * hours)
        folder = saved(tmp_path, step)
        for path in (*folder.iterdir(), folder):
            os.utime(path, (clock() - 1000 * step,) * 2)
    assert loaded(tmp_path) == (4, 4.0)
    shutil.rmtree(folder)
    assert loaded(tmp_path) == (3, 3.0)


# Where a save is ended: the name of what is called, and its how many-eth call.
MOMENTS = [
    *(("writing", n) for n in range(5)),
    *(("flush", n) for n in range(5)),
    *(("rename", n) for n in range(2)),
    ("remove", 0),
]


def dies(folder: Path, function: str, count: int) -> None:
    """Saves step 2, and is killed at a call of the store, or in the middle of writing a file."""
    calls = Counter[str]()
    original = getattr(LocalStore, function)

    def called(*args: Any) -> Any:
        calls[function] += 1
        if calls[function] == count + 1:
            if function == "writing":
                (args[0]._path / args[1]).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    with patch.object(LocalStore, function, called):
        saved(folder, 2)


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["new step", "same step"])
def test_a_save_that_is_killed_leaves_an_older_or_a_complete_one(tmp_path: Path, again: bool) -> None:
    """At every call of the store: what is found is one of the two, whole; and the next save tidies up."""
    for number, (function, count) in enumerate(MOMENTS):
        folder = tmp_path / str(number)
        saved(folder, *([1, 2] if again else [1]))
        try:
            run_local(lambda _rank, _world, f=folder, w=function, c=count: dies(f, w, c), 1, timeout=60, backend=None)
        except WorkerError as error:
            assert "SIGKILL" in str(error)
        else:
            assert (function, count) in [("remove", 0), ("flush", 4)] and not again
        step, value = loaded(folder)
        assert step == value
        assert step in ((2,) if again else (1, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # This process has saved there before the one that was killed.
            saved(folder, 3)
        assert loaded(folder) == (3, 3.0)
        assert [name for name in os.listdir(folder) if "writing" in name and not complete(folder / name)] == []


def folders(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def complete(folder: Path) -> bool:
    return (folder / "manifest.json").is_file()


def test_a_full_disk_is_an_error_and_leaves_the_older_one(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs root, to mount a small disk")
    try:
        saved(tmp_path, 1)
        with pytest.raises(CheckpointError, match=r"nothing was saved in .*No space left"):
            checkpoint.save(tmp_path, nn.Linear(300, 300), step=2)
        assert folders(tmp_path) == {"step-000001"}
        assert loaded(tmp_path) == (1, 1.0)
        assert saved(tmp_path, 3).name == "step-000003"
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_one_rank_that_fails_ends_the_save_on_all(tmp_path: Path) -> None:
    def work(rank: int, world: int) -> str:
        def full(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        model = nn.Linear(600, 600)
        checkpoint.save(tmp_path, model, step=1)
        write = full if rank == 1 else torch_storage.write_file
        with patch.object(torch_storage, "write_file", write), pytest.raises(CheckpointError) as raised:
            checkpoint.save(tmp_path, model, step=2)
        assert checkpoint.load(tmp_path, model).step == 1
        if rank == 0:
            file = max((tmp_path / "step-000001").glob("*.safetensors"))
            flip(file, file.stat().st_size // 2)
        dist.barrier()
        with pytest.raises(CheckpointError, match=r"rank-00001-000\.safetensors is damaged"):
            checkpoint.load(tmp_path, model)
        return str(raised.value)

    for text in on(2, work):
        assert "rank 1: OSError: [Errno 28] No space left on device" in text


PLACED = ["S(0),R", "S(1),S(0)", "S(0),S(0)", "R,S(1/3)", "S(0),S(1/3)", "R,R", "S(1/3),S(1)", "R,S(1)"]


def test_every_element_is_written_once_and_read_where_it_belongs(tmp_path: Path) -> None:
    """Of even, uneven, empty and strided shards, by a mesh of two by two."""

    def work(rank: int, world: int) -> None:
        groups = mesh_groups(init_device_mesh("cpu", (2, 2)))
        for text in PLACED:
            for shape in ((7, 12), (3, 12), (1, 24), (600, 600), (0, 12)):
                slot = TensorSlot("x", "param", "x", shape, parse_placements(text))
                whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
                local = take_local(whole, slot.placements, groups.shape, groups.coordinate).contiguous()
                tensor = make_dtensor(local, slot, groups)
                found = boxes.boxes_of(tensor, "x")
                for box in found:
                    expected = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
                    assert torch.equal(box.of(local), expected), (text, shape)
                assert sum(torch.Size(box.sizes).numel() for box in found) == local.numel()
                own = boxes.boxes_to_write(tensor, "x", boxes.holders_of(tensor, boxes.Holders(world, rank)))
                counts = torch.zeros(shape)
                for box in own:
                    counts[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
                dist.all_reduce(counts)
                assert bool((counts == 1).all()), (text, shape)
        model = nn.Linear(600, 7)
        for placements in ((Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(1), Shard(0))):
            with torch.no_grad():
                model.weight = nn.Parameter(distribute_tensor(torch.ones(7, 600) * 3, groups.mesh, placements))
            name = f"{len(os.listdir(tmp_path))}"
            dist.barrier()
            checkpoint.save(tmp_path / name, model, step=1)
            model.weight = nn.Parameter(distribute_tensor(torch.zeros(7, 600), groups.mesh, [Shard(0), Shard(1)]))
            checkpoint.load(tmp_path / name, model)
            assert bool((model.weight.full_tensor() == 3).all())
            dist.barrier()

    on(4, work)


def test_what_does_not_fit_is_named_before_anything_changes(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    cases: list[tuple[nn.Module, str]] = [
        (nn.Linear(5, 3, bias=False), r"the model has no bias, which .*step-000001 has"),
        (nn.Linear(5, 4), r"weight has shape \[3, 5\] in the checkpoint, and \[4, 5\] here"),
        (nn.Sequential(nn.Linear(5, 3)), r"has no 0\.weight, 0\.bias, which the model has"),
    ]
    for model, message in cases:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(tmp_path, model)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "trained", model, optimizer, step=1)
    with pytest.raises(CheckpointError, match=r"optimizer AdamW, and this one is SGD: make it by .*\(AdamW, "):
        checkpoint.load(tmp_path / "trained", plain(), torch.optim.SGD(plain().parameters()))
    with pytest.raises(CheckpointError, match="has no optimizer"):
        checkpoint.load(tmp_path, plain(), torch.optim.SGD(plain().parameters()))
    with pytest.raises(CheckpointError, match=r"extra/why is a function, which a checkpoint does not hold"):
        checkpoint.save(tmp_path, plain(), step=2, extra={"why": saved})
    with pytest.raises(CheckpointError, match="step=-1"):
        checkpoint.save(tmp_path, plain(), step=-1)
    assert loaded(tmp_path) == (1, 1.0)


def test_values_of_all_kinds_come_back() -> None:
    tree = {
        "a": [1, True, None, "x", 2.5, float("inf")], "b": (1, (2,)), 3: {"$x": b"\x00\xff"}, "c": Counter({30: 2}),
        "d": {"t": torch.arange(3), "e": torch.bfloat16},
    }  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}
    back = from_json(json.loads(json.dumps(to_json(tree, "extra", tensors), allow_nan=False)), tensors.__getitem__)
    assert torch.equal(back["d"].pop("t"), tree["d"].pop("t"))  # type: ignore[index]
    assert back == tree
    assert type(back["c"]) is Counter


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_files_are_errors_or_loads(tmp_path: Path, count: int) -> None:
    """Manifest, index and state, changed anyhow: an :class:`AutoparError`, or values of the same shapes."""
    folder = saved(tmp_path, 1)
    sizes = {file.name: file.bytes for file in read_manifest((folder / "manifest.json").read_text()).files.values()}
    source = random.Random(0)
    readers: dict[str, Callable[[bytes], object]] = {
        "manifest.json": read_manifest,
        "index.json": lambda text: read_index(text, sizes),
        "state.json": lambda text: [from_json(value, str) for value in json.loads(text).values()],
    }
    for number in range(count):
        name = list(readers)[number % 3]
        text = mutated((folder / name).read_bytes(), source)
        try:
            readers[name](text)
        except (AutoparError, json.JSONDecodeError, UnicodeDecodeError) as error:
            assert str(error)
        except AttributeError:
            assert name == "state.json"  # Another JSON than an object, which opening refuses.


def mutated(text: bytes, source: random.Random) -> bytes:
    """``text`` with some bytes changed, deleted, doubled, or numbers replaced."""
    content = bytearray(text)
    for _ in range(source.randint(1, 4)):
        at, kind = source.randrange(len(content)), source.randrange(4)
        if kind == 0:
            content[at] = source.randrange(256)
        elif kind == 1:
            del content[at : at + source.randint(1, 20)]
        elif kind == 2:
            content[at:at] = content[at : at + source.randint(1, 20)]
        else:
            digits = [i for i, c in enumerate(content) if chr(c).isdigit()]
            if digits:
                content[source.choice(digits)] = ord(source.choice("0123456789-.e"))
    return bytes(content)


def test_a_changed_index_with_right_hashes_is_refused(tmp_path: Path) -> None:
    """Someone may compute hashes anew: the index is checked by itself."""
    folder = saved(tmp_path, 1)
    name = "rank-00000-000.safetensors"
    index, sizes = json.loads((folder / "index.json").read_text()), {name: (folder / name).stat().st_size}
    entry = index["tensors"]["model.weight"]
    for change in ({"shape": [3, 6]}, {"pieces": []}, {"dtype": "F64"}, {"pieces": [[[0, 0], [3, 5], 0, 9000]]},
                   {"pieces": [*entry["pieces"], *entry["pieces"]]}, {"shape": [-3, 5]}):  # fmt: skip
        index["tensors"]["model.weight"] = {**entry, **change}
        with pytest.raises(CheckpointError):
            read_index(json.dumps(index), sizes)


def test_manifests_name_files_inside_the_folder_alone(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1)
    from autopar.runtime.checkpoint.manifest import FileRecord, Manifest

    for name in ("../secret", "/etc/passwd", ".hidden", "manifest.json", ""):
        text = Manifest(1, 1, 0.0, {name: FileRecord(name, 1, "0" * 64)}).to_json()
        with pytest.raises(CheckpointError, match="is not the name of a file"):
            read_manifest(text)
    shutil.rmtree(folder)
    with warnings.catch_warnings(), pytest.raises(CheckpointError):
        loaded(tmp_path)


def test_what_is_being_written_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    """Not what this process writes beside training, nor another process; but what a process left that is gone."""
    store = store_of(tmp_path)
    own, host = _begin(store, 1), socket.gethostname()
    left = f"{WRITING}step-000002-{host}-{2**22 + 1}-0123abcd"
    others = f"{WRITING}step-000003-{host}-{os.getppid()}-0123abcd"
    for name in (left, others):
        (tmp_path / name).mkdir()
    second = _begin(store, 4)
    assert folders(tmp_path) == {own, others, second}
    _BEING_WRITTEN.clear()
    third = _begin(store, 5)
    assert folders(tmp_path) == {others, third}
