"""Optimizer state on a local disk: the same numbers, files that are scratch, and errors that say what to do."""

from __future__ import annotations

import copy
import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import checkpoint
from autopar.cluster.description import Cluster
from autopar.errors import AutoparError, InfeasibleError, OptionsError
from autopar.options import Options
from autopar.plans.plan import Plan
from autopar.runtime.state import disk, disk_visits
from autopar.runtime.state.disk import Buffer, DiskState, Piece, remove_stale
from autopar.runtime.state.optimizer import InHost, make_optimizer
from tests.helpers.planning import on

_LOCAL = Cluster.get("local")
DISK = {"nvme_read_bandwidth": 1e9, "nvme_write_bandwidth": 5e8, "nvme_latency": 1e-3, "nvme_bytes": 1 << 34}
CLUSTER = replace(_LOCAL, device=replace(_LOCAL.device, **DISK))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(disk.FOLDER, str(tmp_path))
    return tmp_path


def train(name: str, tier: InHost, **options: Any) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Parameters and their state, read after each step too, with a scheduler, a checkpoint, a gradient that is missing
    once, and more parameters than there are buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4 + k, 5 + k) for k in range(4)), nn.Linear(8, 1201))
    optimizer = make_optimizer(getattr(torch.optim, name), model.named_parameters(), tier, lr=0.1, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    seen: list[torch.Tensor] = []
    for step in range(5):
        model(torch.randn(3, 4)).square().mean().backward()
        if step == 1:
            model[0].weight.grad = None  # type: ignore[union-attr]
        if step == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
        seen += [v.clone() for p in model.parameters() for v in optimizer.state[p].values() if torch.is_tensor(v)]
        scheduler.step()
        optimizer.zero_grad()
    return [*model.parameters(), *seen], [optimizer.state[p] for p in model.parameters()]


@pytest.mark.parametrize(
    ("name", "options"),
    [("AdamW", {}), ("AdamW", {"amsgrad": True}), ("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adagrad", {})],
)
def test_a_disk_changes_no_bit(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = DiskState.write

    def counted(self: DiskState, buffer: Buffer, piece: Piece) -> None:
        written.append(piece[0])
        write(self, buffer, piece)

    monkeypatch.setattr(DiskState, "write", counted)
    monkeypatch.setattr(disk_visits, "NVME_PIECE", 4096)
    expected, stayed = train(name, lambda path: "", **options)
    assert not written
    found, moved = train(name, lambda path: "host" if path == "1.bias" else "nvme", **options)
    # The largest parameter has 9608 elements.
    assert set(written) == ({0, 4096, 8192} if name != "SGD" or options else set())
    assert all(tensor.isfinite().all() for tensor in expected)
    assert len(expected) == len(found) and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    for a, b in zip(stayed, moved, strict=True):
        assert a.keys() == b.keys()


def test_files_where_nothing_is_read_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_DIRECT."""
    plainly = os.open

    def refusing(path: Any, flags: int, *mode: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plainly(path, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)
    expected, _ = train("AdamW", lambda path: "")
    found, _ = train("AdamW", lambda path: "nvme")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_what_is_mapped_and_what_is_moved_are_the_same() -> None:
    shapes = {"a": (torch.Size([3, 700]), torch.float32), "b": (torch.Size([5]), torch.bfloat16)}
    state, buffer, whole = DiskState(shapes), Buffer(), (0, 2100)
    for number in range(4):
        for view in state.views(buffer, whole).values():
            view.fill_(number)
        state.write(buffer, whole)
        assert all((tensor == number).all() for tensor in state.tensors.values())
    state.tensors["b"].fill_(9)
    state.tensors["a"].view(-1)[1024:1030] = 8
    state.read(buffer, whole)
    assert (state.views(buffer, whole)["b"] == 9).all()
    state.read(buffer, (1024, 2100))
    views = state.views(buffer, (1024, 2100))
    assert views["a"].tolist() == [8.0] * 6 + [3.0] * 1070 and views["b"].numel() == 0
    path = state.path
    assert path.exists()
    mapped = state.tensors["b"]
    del state
    assert not path.exists() and (mapped == 9).all()


def test_shards_that_are_not_contiguous_are_updated_where_they_are() -> None:
    weights = [nn.Parameter(torch.arange(12.0).reshape(3, 4).t()) for _ in range(2)]
    for weight, tier in zip(weights, ("", "nvme"), strict=True):
        optimizer = make_optimizer(torch.optim.AdamW, [("weight", weight)], lambda path, tier=tier: tier, lr=0.1)
        for step in range(3):
            weight.grad = (weight.detach() - step).square()
            optimizer.step()
    assert torch.equal(*weights) and not weights[1].is_contiguous()


def test_a_full_disk_and_a_folder_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(AutoparError, match=r"the disk is full \(\d+ bytes are free\).*AUTOPAR_OFFLOAD"):
        train("AdamW", lambda path: "nvme")
    monkeypatch.undo()
    monkeypatch.setenv(disk.FOLDER, str(tmp_path / "absent"))
    with pytest.raises(AutoparError, match=r"cannot make a folder in .*absent: No such file.*set \$AUTOPAR_OFFLOAD"):
        train("AdamW", lambda path: "nvme")
    monkeypatch.setenv(disk.FOLDER, str(tmp_path))
    monkeypatch.setattr(os, "preadv", full)
    with pytest.raises(AutoparError, match="cannot read"):
        train("AdamW", lambda path: "nvme")


KILLED = """
import sys, torch
from autopar.runtime.state.disk import DiskState
state = DiskState({"a": (torch.Size([10]), torch.float32)})
print(state.path.parent, flush=True)
if sys.argv[1] == "waits":
    sys.stdin.read()
"""


def test_a_folder_goes_with_its_process_and_is_removed_after_a_kill(folder: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, "ends"], capture_output=True, text=True, check=True)
    assert not Path(ended.stdout.strip()).exists()
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    left = Path(process.stdout.readline().strip())
    assert left.exists() and remove_stale(folder) == [] and left.exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    assert left.exists() and remove_stale(folder) == [left] and not left.exists()


def planned(**options: Any) -> Plan:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(10)))
    cluster, asked = options.pop("cluster", CLUSTER), Options(**options)

    def loss(out: torch.Tensor) -> torch.Tensor:
        return out.square().mean()

    return autopar.plan(model, (1,), torch.ones(8, 64), cluster=cluster, loss_fn=loss, options=asked)


def test_state_goes_to_the_disk_where_the_step_does_not_fit_otherwise() -> None:
    free = planned(recompute="none")
    limit = int(free.predicted.peak_bytes - 0.2 * free.predicted.optimizer_bytes)
    some = planned(recompute="none", memory_limit=limit)
    assert some.predicted.peak_bytes <= limit and some.predicted.nvme_bytes > 0
    away = {path for path, place in planned(offload="optimizer=nvme").parameters.items() if place.offload == "nvme"}
    assert away == set(free.parameters) and not any(place.offload for place in free.parameters.values())
    plan = planned(offload="optimizer=nvme", recompute="none")
    assert plan.predicted.nvme_bytes == free.predicted.optimizer_bytes and plan.predicted.optimizer_bytes == 0
    assert plan.objective == pytest.approx(sum(line.seconds for line in plan.lines), rel=1e-9)
    assert Plan.from_json(plan.to_json()) == plan == Plan.from_text(plan.to_text())
    assert "on a local disk, besides" in str(plan) and "on a local disk" in str(plan.why("0.weight"))


def test_a_disk_that_is_too_small_or_not_there() -> None:
    with pytest.raises(OptionsError, match="describes no local disk; leave offload out"):
        planned(offload="optimizer=nvme", cluster=_LOCAL)
    small = replace(CLUSTER, device=replace(CLUSTER.device, nvme_bytes=1000))
    with pytest.raises((InfeasibleError, OptionsError), match="disk"):
        planned(offload="optimizer=nvme", cluster=small)
    with pytest.raises(OptionsError, match="nvme_bytes go together"):
        replace(CLUSTER.device, nvme_bytes=0)


def trained(tmp: Path, offload: Any, world: int, steps: int, load: bool, save: bool, kill: bool = False) -> list[Any]:
    reference, batch = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8)), torch.randn(4, 8)
    options = Options(offload=offload, zero=1)
    model = autopar.parallelize(copy.deepcopy(reference), (world,), batch, options=options, cluster=CLUSTER)
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.1)
    if load:
        checkpoint.load(tmp / "checkpoint", model, optimizer)
    for step in range(steps):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if save and step == 1:
            checkpoint.save(tmp / "checkpoint", model, optimizer, step=step)
            if kill:
                # In the middle of the next update: half of what is written arrives.
                disk.DiskState._move = _dies  # type: ignore[method-assign]
    states = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    return [model.full_tensor(t) for t in [*model.parameters(), *states]]


def _dies(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_processes_train_alike_with_state_on_a_disk_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    def work(rank: int, world: int) -> list[list[torch.Tensor]]:
        torch.manual_seed(0)
        stayed = trained(tmp_path, False, world, 4, load=False, save=False)
        torch.manual_seed(0)
        moved = trained(tmp_path, "optimizer=nvme", world, 4, load=False, save=True)
        torch.manual_seed(0)
        return [stayed, moved, trained(tmp_path, "optimizer=nvme", world, 2, load=True, save=False)]

    for stayed, *others in on(2, work):
        for found in others:
            assert all(torch.equal(a, b) for a, b in zip(stayed, found, strict=True))


@pytest.mark.slow
def test_a_kill_during_an_update_loses_nothing_of_a_checkpoint(tmp_path: Path) -> None:
    def killed(rank: int, world: int) -> None:
        torch.manual_seed(0)
        trained(tmp_path, "optimizer=nvme", world, 4, load=False, save=True, kill=True)

    def resumed(rank: int, world: int) -> list[list[torch.Tensor]]:
        torch.manual_seed(0)
        stayed = trained(tmp_path, False, world, 4, load=False, save=False)
        torch.manual_seed(0)
        return [stayed, trained(tmp_path, "optimizer=nvme", world, 2, load=True, save=False)]

    with pytest.raises(AutoparError):
        on(2, killed)
    assert list(tmp_path.glob("autopar-offload-*"))
    for stayed, found in on(2, resumed):
        assert all(torch.equal(a, b) for a, b in zip(stayed, found, strict=True))


def test_a_fork_that_ends_leaves_the_files_alone(tmp_path: Path) -> None:
    script = """
import os, sys, torch
from autopar.runtime.state.disk import DiskState
state = DiskState({"exp_avg": (torch.Size([8]), torch.float32)})
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
other = DiskState({"exp_avg": (torch.Size([8]), torch.float32)})
print(state.path.exists(), other.path.exists())
"""
    environment = {**os.environ, "AUTOPAR_OFFLOAD": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"] and not list(tmp_path.iterdir())
