"""Plans made beside training are those that a run on other devices takes from the cache."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

import autopar
from autopar.compiler.plan_ahead import (
    COMMAND,
    _is_first_of_host,
    _of_size,
    _on_mesh,
    _wanted,
    main,
    make,
    requests_for,
)
from tests.helpers.planning import on


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu()).square().mean()


def batch(size: int) -> torch.Tensor:
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(0))


OPTIONS = autopar.Options(zero=3, seed=1)


def test_other_meshes_find_their_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that cannot be made are a line on stderr each, of the process beside training."""
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))

    def trained(rank: int, world: int) -> bytes:
        model = autopar.parallelize(Net(), (world,), options=OPTIONS)
        with pytest.raises(autopar.AutoparError, match="not planned here yet"):
            autopar.plan_ahead(model, [3])
        for none in ({3: 0}, 4, [4.0], [[2, "4"]], [()], [True], "34", [{2: 4}]):
            with pytest.raises(autopar.OptionsError, match="are no meshes"):
                autopar.plan_ahead(model, none)  # type: ignore[arg-type]
        model.step(batch(12))
        del os.environ["LOCAL_RANK"]
        assert [_is_first_of_host(model), _wanted([[2, 4]])] == [rank == 0, [((2, 4), None)]]
        return pickle.dumps(requests_for(model, [((3,), None), ((1,), 6)]))

    requests = pickle.loads(on(2, trained)[0])
    named = replace(requests[0], axis_names=("dp", "tp"))
    for mesh in ((4,), (2, 2, 2)):
        with pytest.raises(
            autopar.OptionsError, match=r"axes dp, tp, but the mesh .* has (1|3): .* such as \((4, 1|2, 2)\)"
        ):
            _on_mesh(named, mesh)
    assert _on_mesh(named, (4, 2)).mesh == (4, 2)
    fixed = replace(requests[0], graph=replace(requests[0].graph, symbols=()))
    with pytest.raises(autopar.OptionsError, match=r"global batch of 16 .* for a batch of 12 alone"):
        _of_size(fixed, 16, None)  # type: ignore[arg-type]
    assert _of_size(fixed, 12, None) == fixed  # type: ignore[arg-type]
    assert make(requests) == []
    tight = replace(requests[0], options=replace(requests[0].options, memory_limit=100))
    none = replace(requests[0], graph=None)
    with patch.object(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pickle.dumps([tight, none])))), patch("os.nice"):
        main()
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("autopar: no plan is made ahead for mesh (3,): ") and "fits" in first
    assert second.startswith("autopar: no plan is made ahead for mesh (3,): AttributeError: ")

    def restarted(rank: int, world: int) -> list[str]:
        return list(autopar.parallelize(Net(), (world,), batch(12), options=OPTIONS).plan.timings)

    assert on(3, restarted)[0] == ["cache"]
    assert list(autopar.plan(Net(), (1,), batch(6), options=OPTIONS).timings) == ["cache"]
    assert list(autopar.plan(Net(), (1,), batch(12), options=OPTIONS).timings) != ["cache"]


@pytest.mark.slow
def test_a_process_beside_training_makes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))

    def trained(rank: int, world: int) -> bool:
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        model = autopar.parallelize(Net(), (world,), batch(12), options=OPTIONS)
        ahead = autopar.plan_ahead(model, [3, (2, 2)])
        assert ahead.done == (rank == 1)
        return ahead.wait(120) and ahead.done

    assert on(2, trained) == [True, True]
    own = subprocess.run(COMMAND, input=pickle.dumps([]), capture_output=True, check=True)
    assert own.stdout + own.stderr == b"", "nothing in the midst of a training's own lines"
    for mesh in ((3,), (2, 2)):
        assert list(autopar.plan(Net(), mesh, batch(12), options=OPTIONS).timings) == ["cache"]
