"""A training goes on where it was saved: under the same plan to the bit, under any other as exactly as that allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import Options, checkpoint
from autopar.runtime.checkpoint.ranks import ranks_of
from tests.helpers.marks import needs_groups_in_order
from tests.helpers.planning import on

from .training import Run, assert_equal, batch_of, parallel, reference, run

BEFORE, AFTER = 3, 10
SHARDED: dict[str, Any] = {"zero": 3, "stages": 1}
STAGED: dict[str, Any] = {"stages": 2, "microbatches": 2, "schedule": "1f1b"}
# Of losses and of values after ten more steps under another plan, which adds in another order.
TOLERANCE = 1e-5
Traced = tuple[list[float], dict[str, torch.Tensor]]


def saves(folder: Path, made: Run) -> Traced:
    """Trains, saves, and goes on as if nothing had been."""
    made.steps(range(BEFORE))
    path = checkpoint.save(
        folder, made.model, made.optimizer, scheduler=made.scheduler, step=BEFORE, extra={"tokens": (1, 2.5)}
    )
    assert Path(path) == folder / f"step-{BEFORE:06d}"
    return made.steps(range(BEFORE, BEFORE + AFTER)), made.whole()


def loads(folder: Path, made: Run) -> Traced:
    """Goes on from the newest checkpoint."""
    found = checkpoint.load(folder, made.model, made.optimizer, scheduler=made.scheduler)
    assert (found.step, found.extra) == (BEFORE, {"tokens": (1, 2.5)})
    return made.steps(range(BEFORE, BEFORE + AFTER)), made.whole()


def assert_goes_on(found: Traced, wanted: Traced, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    assert_equal(found[1], wanted[1], tolerance)


def test_another_plan_and_one_process_go_on(tmp_path: Path) -> None:
    """Saved in shards; loaded in the same, before the first batch too, in stages between which a weight is tied, and by
    one process."""

    def work(rank: int, world: int) -> list[Traced]:
        return [
            saves(tmp_path, parallel((world,), **SHARDED)),
            loads(tmp_path, parallel((world,), **SHARDED)),
            loads(tmp_path, parallel((world,), planned=False, **SHARDED)),
            loads(tmp_path, parallel((world,), **STAGED)),
        ]

    for wanted, same, early, staged in on(2, work):
        assert_goes_on(same, wanted, tolerance=0.0)
        assert_goes_on(early, wanted, tolerance=0.0)
        assert_goes_on(staged, wanted)
    try:
        assert_goes_on(loads(tmp_path, parallel((1,))), wanted)
    finally:
        dist.destroy_process_group()
    check_files(tmp_path / f"step-{BEFORE:06d}")


@needs_groups_in_order
def test_a_transposed_mesh_gathers_and_goes_on(tmp_path: Path) -> None:
    """Ranks are in the order of the mesh, also where small messages and blocks of tensors say whose they are."""

    def work(rank: int, world: int) -> None:
        mesh = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]))
        made = run(autopar.parallelize(reference(), mesh, (batch_of(0),), options=Options(seed=3, **SHARDED)))
        ranks = ranks_of(made.model)
        assert (ranks.index, ranks.all(rank)) == ((0, 2, 1, 3).index(rank), [0, 2, 1, 3])
        gathered = checkpoint.full_state_dict(made.model)
        if rank == 0:
            assert_equal(gathered, reference().state_dict())
        made.steps(range(2))
        checkpoint.save(tmp_path, made.model, made.optimizer, step=2)
        saved = made.whole()
        made.steps(range(2, 4))
        checkpoint.load(tmp_path, made.model, made.optimizer)
        assert_equal(made.whole(), saved)

    on(4, work)


@pytest.mark.slow
def test_stages_of_unequal_numbers_of_devices_go_on(tmp_path: Path) -> None:
    """Saved by stages on one device and on two, loaded by the same, by the other way round, by equal stages, in
    shards, and by one process."""
    unequal: dict[str, Any] = {"microbatches": 2, "schedule": "1f1b", "zero": 1}

    def work(rank: int, world: int) -> list[Traced]:
        return [
            saves(tmp_path, parallel((world,), stages=(1, 2), **unequal)),
            loads(tmp_path, parallel((world,), stages=(1, 2), **unequal)),
            loads(tmp_path, parallel((world,), stages=(2, 1), **unequal)),
            loads(tmp_path, parallel((world,), stages=3, microbatches=2)),
            loads(tmp_path, parallel((world,), **SHARDED)),
        ]

    for wanted, same, *others in on(3, work):
        assert_goes_on(same, wanted, tolerance=0.0)
        for other in others:
            assert_goes_on(other, wanted)
    try:
        assert_goes_on(loads(tmp_path, parallel((1,))), wanted)
    finally:
        dist.destroy_process_group()


def check_files(folder: Path) -> None:
    """Tensors by the names of the state dict, once each; JSON beside them; safetensors that the package reads."""
    from safetensors.torch import load_file

    index = json.loads((folder / "index.json").read_text())["tensors"]
    assert "model.embed.weight" in index
    assert "model.head.weight" not in index
    assert "optimizer.state.up.weight.exp_avg" in index
    state = json.loads((folder / "state.json").read_text())
    assert state["model"]["tied"] == {"head.weight": "embed.weight"}
    assert state["parallel"]["options"]["zero"] == 3
    assert state["versions"]["torch"] == torch.__version__
    shards = [load_file(file) for file in sorted(folder.glob("rank-*.safetensors"))]
    assert sum(t.numel() for shard in shards for n, t in shard.items() if n.startswith("model.up.weight")) == 42


@pytest.mark.slow
def test_plain_torch_goes_on_from_shards_and_back(tmp_path: Path) -> None:
    """Without dropout, whose numbers are torch's own in a plain model."""

    def shards(rank: int, world: int) -> Traced:
        return saves(tmp_path / "shards", parallel((world,), dropout=0.0, **SHARDED))

    wanted = on(2, shards)[0]
    assert_goes_on(loads(tmp_path / "shards", run(reference(0.0))), wanted)
    kept = saves(tmp_path / "plain", run(reference(0.0)))

    def back(rank: int, world: int) -> Traced:
        return loads(tmp_path / "plain", parallel((world,), dropout=0.0, **SHARDED))

    for found in on(2, back):
        assert_goes_on(found, kept)


MESHES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "four, sharded": ((4,), SHARDED),
    "two by two": ((2, 2), {"zero": 1, "stages": 1}),
    "stages": ((4,), {**STAGED, "zero": None}),
    "replicated": ((4,), {"zero": 0, "stages": 1}),
    "bf16": ((4,), {**SHARDED, "precision": "bf16"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("saving", MESHES)
def test_every_pair_of_plans(tmp_path: Path, saving: str) -> None:
    """Also under another precision, where only what was loaded is compared."""
    mesh, options = MESHES[saving]

    def work(rank: int, world: int) -> list[Any]:
        made = parallel(mesh, **options)
        made.steps(range(BEFORE))
        before = made.whole()
        checkpoint.save(tmp_path, made.model, made.optimizer, scheduler=made.scheduler, step=BEFORE)
        wanted = made.steps(range(BEFORE, BEFORE + AFTER)), made.whole()
        found = []
        for other, asked in MESHES.values():
            again = parallel(other, **asked)
            checkpoint.load(tmp_path, again.model, again.optimizer, scheduler=again.scheduler)
            loaded = again.whole()
            found.append((loaded, (again.steps(range(BEFORE, BEFORE + AFTER)), again.whole())))
        return [before, wanted, found]

    before, wanted, found = on(4, work, timeout=280.0)[0]
    for name, (loaded, after) in zip(MESHES, found, strict=True):
        assert_equal(loaded, before)
        if ("bf16" in name) == ("bf16" in saving):
            assert_goes_on(after, wanted, 0.0 if name == saving else 2e-2 if name == "bf16" else TOLERANCE)
