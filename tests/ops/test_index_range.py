"""Ids and labels out of range: an IndexError on every rank, as eager execution raises one, and no gradient of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.ops.index_range import any_outside, take_out_of_range
from autopar.ops.masked import LOCAL_OPS
from autopar.runtime.execute.index_guards import GUARDED
from tests.helpers.marks import slow_but
from tests.helpers.planning import on, slow_devices

ROWS, CLASSES = 24, 20


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(ROWS, 16), nn.Linear(16, 32), nn.Linear(32, CLASSES)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.down(self.up(self.embed(ids)).relu().flatten(0, 1))
        return nn.functional.cross_entropy(scores, labels.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(12 * 4).reshape(12, 4)
    return ids % ROWS, torch.where(ids % 5 == 0, -100, ids % CLASSES)


PLANS: dict[str, dict[str, Any]] = {
    "vocabulary": {"pins": {"embed.weight": "R,S(0)", "down": "S(0),S(1)"}},
    "data": {"pins": {"embed": "S(0),S(0)", "embed.weight": "R,R"}},
    "stages": {"stages": 2, "microbatches": 2},
}


@pytest.mark.parametrize("name", slow_but(["data"], ["vocabulary", "data", "stages"]))
def test_every_rank_is_told_of_an_index_that_some_meet(name: str) -> None:
    """In the last sample alone, which half of the ranks read. The next step is as if nothing had happened."""

    def work(rank: int, world: int) -> list[str]:
        stages = name == "stages"
        options = autopar.Options(**PLANS[name], mesh_search=stages)
        model = autopar.parallelize(Tokens(), (4,) if stages else (2, 2), options=options, cluster=slow_devices())
        wanted = model.step(*batch())
        before = {path: model.full_tensor(p.grad) for path, p in model.named_parameters() if p.grad is not None}
        said = []
        for place, value in ((0, ROWS), (0, -1), (1, CLASSES + 3), (1, -1)):
            given = batch()
            given[place][11, 3] = value
            with pytest.raises(autopar.IndexRangeError) as raised:
                model.step(*given)
            assert isinstance(raised.value, IndexError)
            said.append(str(raised.value))
        with pytest.raises(autopar.IndexRangeError), torch.no_grad():
            model(*given)
        for path, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(model.full_tensor(parameter.grad), before[path], rtol=0, atol=0)
        torch.testing.assert_close(model.step(*batch()), wanted)
        return said

    everyone = on(4, work)
    assert all(said == everyone[0] for said in everyone)
    large, negative, label, below = everyone[0]
    assert f"index {ROWS} is out of range, not 0 <= index < {ROWS}, in module embed" in large
    assert f"index -1 is out of range, not 0 <= index < {ROWS}, in module embed" in negative
    assert f"index {CLASSES + 3} is out of range, not 0 <= index < {CLASSES}" in label and "index -1" in below
    assert "in module embed, a value of the input ids" in large
    assert "in the model's own forward or loss_fn, a value of " in label and "the input labels" in label
    if name == "data":
        assert "(met on rank 3)" in label, "the others were told"


class Masked(nn.Module):
    """The nan of the first token reaches neither output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(ROWS, 16), nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.up(self.embed(ids)).relu()
        return torch.where(keep[:, None], scores, 0.0).mean(), scores.argmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize("integers", slow_but([False], [False, True]))
def test_every_rank_is_told_of_an_index_that_no_result_tells_of(integers: bool) -> None:
    def work(rank: int, world: int) -> str:
        options = autopar.Options(stages=2, microbatches=2)  # Stage 0 alone meets it.
        model = autopar.parallelize(Masked(), (2,), options=options, loss_fn=lambda out: out[0], cluster=slow_devices())
        ids, keep = torch.arange(8), torch.zeros(8, dtype=torch.bool)
        model.step(ids, keep)
        before = model.full_tensor(model.get_parameter("embed.weight").grad)
        ids[7] = ROWS
        with pytest.raises(autopar.IndexRangeError) as raised:
            if integers:
                with torch.no_grad():
                    model(ids, keep)
            else:
                model.step(ids, keep)
        torch.testing.assert_close(model.full_tensor(model.get_parameter("embed.weight").grad), before)
        model.step(torch.arange(8), keep)
        return str(raised.value)

    first, second = on(2, work)
    assert first == second and "(met on rank 0)" in first, "one was told"


INDEX = torch.tensor([0, 4])
CALLS: dict[str, tuple[Any, ...]] = {
    "aten.embedding.default": (torch.ones(5, 2), INDEX),
    "aten.embedding_dense_backward.default": (torch.ones(2, 2), INDEX, 5, -1, False),
    "aten.gather.default": (torch.ones(5), 0, INDEX),
    "aten.index_select.default": (torch.ones(5), 0, INDEX),
    "aten.scatter.value": (torch.ones(5), 0, INDEX, 2.0),
    "aten.scatter.src": (torch.ones(5), 0, INDEX, torch.ones(2)),
    "aten.scatter_.value": (torch.ones(5), 0, INDEX, 2.0),
    "aten.scatter_.src": (torch.ones(5), 0, INDEX, torch.ones(2)),
    "aten.scatter_add.default": (torch.ones(5), 0, INDEX, torch.ones(2)),
    "aten.index_add.default": (torch.ones(5), 0, INDEX, torch.ones(2)),
    "aten.index.Tensor": (torch.ones(5), [INDEX]),
    "aten._unsafe_index.Tensor": (torch.ones(5), [INDEX]),
    "aten.index_put.default": (torch.ones(5), [INDEX], torch.ones(2)),
    "aten._unsafe_index_put.default": (torch.ones(5), [INDEX], torch.ones(2)),
}


@pytest.mark.parametrize("name", GUARDED)
def test_a_guarded_operation_is_the_operation_unless_an_index_is_out_of_range(name: str) -> None:
    _, packet, overload = name.split(".")
    wanted = getattr(getattr(torch.ops.aten, packet), overload)(*CALLS[name])
    torch.testing.assert_close(GUARDED[name](*CALLS[name]), wanted)  # What it writes to has been written to: the same.
    assert take_out_of_range() == []
    for value in (5, -6):
        bad = torch.tensor([0, value])
        given = [[bad] if isinstance(a, list) else bad if a is INDEX else a for a in CALLS[name]]
        assert bool(GUARDED[name](*given).isnan().all())
        assert [one.value for one in take_out_of_range()] == [value] and take_out_of_range() == []


def test_a_shard_of_a_table_knows_what_no_shard_holds() -> None:
    table = torch.ones(3, 2)
    for index, bad in ((torch.tensor([0, 5]), False), (torch.tensor([6]), True), (torch.tensor([-1]), True)):
        for name, given in (
            ("embedding", (table, index)),
            ("index_select", (table, 0, index)),
            ("gather", (table[:, 0], 0, index)),
        ):
            found = LOCAL_OPS[f"autopar.masked_{name}"](*given, 3, 6)
            assert bool(found.isnan().any()) is bad
            assert len(take_out_of_range()) == int(bad)


def test_nothing_is_asked_of_fake_tensors_and_masks() -> None:
    assert not any_outside(torch.empty(3, dtype=torch.int64, device="meta"), 0, 1)
    assert not any_outside(torch.ones(3, dtype=torch.bool), 0, 1) and not any_outside(torch.empty(0).long(), 0, 1)
