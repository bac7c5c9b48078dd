"""Pipelines within a limit of memory are sought by what their stages hold, which is less than what is counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar import InfeasibleError, Layout, Options
from autopar.cluster.description import Cluster
from autopar.compiler.calls import Compiler
from autopar.runtime.calls.compiled import Request
from autopar.runtime.comm.groups import AxisGroup
from autopar.search import rehearsed_memory, rehearsed_rounds
from tests.helpers.planning import CLUSTER


class Mixed(nn.Module):
    """A block of an MLP-mixer of 16 tokens."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        mixed: torch.Tensor = x + self.channels(self.norms[1](x))
        return mixed


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Mixed() for _ in range(4))), nn.Linear(48, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.blocks(x).mean(1)), labels)


def batch(size: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(size, 16, 48), "labels": torch.zeros(size, dtype=torch.int64)}


def planned(limit: int | None) -> autopar.Plan:
    options = Options(layout=Layout(data=2, pipeline=2, microbatch=3), memory_limit=limit)
    return autopar.plan(Mixer(), (2, 2), batch(12), cluster=CLUSTER, options=options)


@pytest.mark.parametrize("part", [1.0, 0.85])
def test_a_limit_on_what_stages_hold_costs_little(part: float) -> None:
    free = planned(None)
    limit = int(part * free.predicted.peak_bytes)
    found = planned(limit)
    assert found.pipeline is not None and max(found.pipeline.peaks) == found.predicted.peak_bytes <= limit
    assert found.predicted.step_seconds <= (1.0 if part == 1.0 else 1.05) * free.predicted.step_seconds


def test_a_batch_of_another_size_is_refused_by_what_it_holds() -> None:
    """More is counted of the smaller one than the limit, as of the planned step."""
    limit = int(0.85 * planned(None).predicted.peak_bytes)
    compiler = Compiler(
        model=Mixer(), mesh=(2, 2), axis_names=(), cluster=Cluster.get(CLUSTER), options=Options(),
        device=torch.device("cpu"), ranks=AxisGroup(None, 1, 0), plan=planned(limit),
    )  # fmt: skip
    asked = (Request((), batch(size), training=True, grad=True, outputs="loss") for size in (12, 8, 24))
    compiler(next(asked))
    compiler(next(asked))
    with pytest.raises(autopar.InfeasibleError, match=f"more than its limit of {limit}"):
        compiler(next(asked))


@pytest.mark.parametrize(("seconds", "leads"), [(0.8, "quicker"), (0.95, "fits")])
def test_a_much_slower_schedule_that_fits_does_not_lead(
    monkeypatch: pytest.MonkeyPatch, seconds: float, leads: str
) -> None:
    """Less memory is tried until a quick schedule fits too."""
    monkeypatch.setattr(rehearsed_memory, "peaks_within", lambda solution, _: (solution.peak,))
    fits = SimpleNamespace(name="fits", seconds=1.0, peak=9)
    quicker = SimpleNamespace(name="quicker", seconds=seconds, peak=11)
    tried = SimpleNamespace(request=SimpleNamespace(limits=(10.0,)))
    own: Any = SimpleNamespace(fits=fits, priced=(quicker, fits), tried=tried)
    found: Any = rehearsed_rounds._leading(own)
    assert found.name == leads


def _solution(seconds: float | None) -> Any:
    return None if seconds is None else SimpleNamespace(seconds=seconds)


@pytest.mark.parametrize(("seconds", "ends"), [(None, False), (1.005, True), (1.05, False)])
def test_other_cuts_of_the_quickest_placements_end_the_search_if_they_cost_little(
    monkeypatch: pytest.MonkeyPatch, seconds: float | None, ends: bool
) -> None:
    own, cut = SimpleNamespace(priced=(_solution(1.0),), fits=None), _solution(seconds)
    monkeypatch.setattr(rehearsed_rounds, "_recut", lambda *_: SimpleNamespace(priced=(), fits=cut))
    monkeypatch.setattr(rehearsed_rounds, "_too_much", lambda sought, state, own: (state, "less"))
    sought: Any = SimpleNamespace(request=SimpleNamespace(limits=(1.0,)))
    state, program = rehearsed_rounds._after_free(sought, own)  # type: ignore[arg-type]
    assert state.recut is cut and state.found is None and (program is None) == ends


def test_other_cuts_are_what_is_left_where_placements_cannot_save_memory() -> None:
    free, cut = _solution(None), _solution(2.0)
    state = rehearsed_rounds._State(recut=cut)
    assert rehearsed_rounds._after_infeasible(free, state, free, InfeasibleError("less")) == (state, None)
    with pytest.raises(InfeasibleError):
        rehearsed_rounds._after_infeasible(free, rehearsed_rounds._State(), free, InfeasibleError("less"))
