"""``Options(sync=...)``: what is refused, and what plans record."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import autopar
from autopar import Cluster, DiLoCo, Gossip, LocalSGD, Options, OptionsError, Plan, PowerSGD, TopK
from autopar.cluster.description import Link
from autopar.runtime.averaging.rows import own_rows, part_of
from tests.runtime.averaging.training import batches, made


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: Options(sync="sometimes"), "'every-step', autopar.LocalSGD"),
        (lambda: Options(sync=LocalSGD), "is a class"),
        (lambda: Options(sync=Gossip), "autopar.Gossip()"),
        (lambda: Options(sync=Gossip(), mode="inference"), "leave sync out"),
        (lambda: LocalSGD(every=0), "every=0"),
        (lambda: LocalSGD(every=True), "every=True"),
        (lambda: LocalSGD(every=2, fragments=3), "at most 2 fragments"),
        (lambda: LocalSGD(every=4, delay=4), "delay=3 at most, or every=5 at least"),
        (lambda: LocalSGD(every=4, staleness=9), "staleness=3 at most"),
        (lambda: LocalSGD(every=4, delay=1, staleness=1), "exclude each other"),
        (lambda: LocalSGD(every=4, mix=1.0), "nothing would be exchanged"),
        (lambda: LocalSGD(every=4, compression="fp8"), "'bf16', 'int8'"),
        (lambda: LocalSGD(every=4, delay=1, compression=PowerSGD()), "leave out delay"),
        (lambda: LocalSGD(every=4, patience=0.5), "patience=0.5) is not a number of seconds from 1 on"),
        (lambda: Gossip(patience=True), "patience=True"),
        (lambda: DiLoCo(every=4, outer="sgd"), "functools.partial"),
        (lambda: DiLoCo(every=4, outer=torch.optim.SGD([torch.ones(1)], lr=1.0)), "functools.partial"),
        (lambda: Gossip("star"), "'ring', 'exponential', 'random'"),
        (lambda: Gossip("random", compression="int8"), "topology='ring'"),
        (lambda: Gossip(compression=PowerSGD()), "'bf16', 'int8' or TopK"),
        (lambda: Gossip(consensus=0.0), "consensus=0.0"),
        (lambda: TopK(0.0), "fraction in"),
        (lambda: PowerSGD(rank=0), "rank=0"),
        (lambda: LocalSGD(evry=3), "every"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(make: Any, says: str) -> None:
    with pytest.raises(autopar.AutoparError, match=says.replace("(", r"\(").replace(")", r"\)")):
        make()


def test_options_of_ranks_can_be_compared() -> None:
    outer = partial(torch.optim.SGD, lr=0.5)
    assert repr(DiLoCo(every=4, outer=outer)) == repr(DiLoCo(every=4, outer=partial(torch.optim.SGD, lr=0.5)))
    assert repr(DiLoCo(every=4, outer=outer)) != repr(DiLoCo(every=4, outer=partial(torch.optim.SGD, lr=0.6)))
    assert "0x" not in repr(DiLoCo(every=4, outer=lambda own: torch.optim.SGD(own, lr=1.0)))


def test_verify_says_what_to_verify() -> None:
    with pytest.raises(OptionsError, match="leave sync out"):
        autopar.verify(made(), (2,), batches()[0], options=Options(sync=LocalSGD(every=2)))


def slow_between(megabits: float) -> Cluster:
    local = Cluster.get("local")
    inside = replace(local.links[0], name="host", size=2)
    return replace(local, links=(inside, Link("network", None, megabits * 1e6 / 8, 1e-3, adapters=1)))


def planned(sync: Any, mesh: tuple[int, ...] = (2, 2), megabits: float = 100.0) -> Plan:
    options = Options(sync=sync, seed=0)
    return autopar.plan(made(), mesh, batches(rows=12)[0], options=options, cluster=slow_between(megabits))


@pytest.mark.parametrize("sync", [LocalSGD(every=2), Gossip("ring")])
def test_numbers_of_64_bits_are_sent_as_such(sync: Any) -> None:
    wide, narrow = (
        autopar.plan(
            made().to(dtype),
            (2,),
            {name: value.to(dtype) for name, value in batches(rows=12)[0].items()},
            options=Options(sync=sync),
            cluster=slow_between(100.0),
        ).sync
        for dtype in (torch.float64, torch.float32)
    )
    assert wide is not None and narrow is not None
    assert wide.bytes == 2 * narrow.bytes and wide.seconds > narrow.seconds


def test_a_plan_is_that_of_a_replica_and_prices_the_exchange() -> None:
    plan = planned(LocalSGD(every=10))
    assert plan.sync is not None and (plan.sync.replicas, plan.sync.every) == (2, 10)
    assert plan.mesh == (2,) and plan.batch == 6
    elements = sum(parameter.numel() for parameter in made().parameters())
    # Of 64 bits; each of two ranks sends half of what it owns, twice.
    assert plan.sync.bytes == round(8 * elements / 2)
    assert plan.sync.seconds == plan.sync.gradient_seconds
    assert plan.sync.seconds_per_step == plan.sync.seconds / 10
    text = str(plan)
    assert "2 replicas of this plan, LocalSGD(every=10" in text and "a step" in text and len(text.splitlines()) <= 40


def test_questions_count_all_replicas_and_their_exchange() -> None:
    plan = planned(LocalSGD(every=10))
    assert plan.sync is not None
    answers = plan.whatif(devices=[(2, 1), (4, 1)]).of("devices")
    assert [answer.plan.batch * answer.plan.sync.replicas for answer in answers] == [2 * plan.batch] * 2
    for answer in answers:
        assert answer.seconds == answer.plan.predicted.step_seconds + answer.plan.sync.seconds / 10
    cells = plan.whatif(devices=[(4, 1)]).rows("devices")[0]
    assert f"{2 * plan.batch / answers[1].seconds:,.3g}" in cells


@pytest.mark.parametrize("sync", [DiLoCo(every=4, delay=1), Gossip(), LocalSGD(every=2, compression=TopK(0.1))])
def test_the_record_survives_its_files(sync: Any) -> None:
    plan = planned(sync)
    assert plan.sync is not None and plan.sync.method == repr(sync)
    assert Plan.from_json(plan.to_json()) == plan == Plan.from_text(plan.to_text())
    without = replace(plan, sync=None)
    (setting,) = without.diff(plan).settings
    assert (setting.path, setting.before, setting.after) == ("sync", "every-step", f"2 x {sync!r}")
    assert '"sync"' not in without.to_json() and Plan.from_json(without.to_json()) == without
    with pytest.raises(OptionsError, match="sync has 0 replicas"):
        replace(plan, sync=replace(plan.sync, replicas=0)).validate()


def test_smaller_exchanges_cost_less() -> None:
    def seconds(sync: Any) -> float:
        record = planned(sync, megabits=0.01).sync
        assert record is not None
        return record.seconds_per_step

    whole, half = seconds(LocalSGD(every=2)), seconds(LocalSGD(every=4))
    assert half == pytest.approx(whole / 2)
    assert seconds(LocalSGD(every=2, compression="int8")) < seconds(LocalSGD(every=2, compression="bf16")) < whole
    assert seconds(LocalSGD(every=2, compression=PowerSGD(1))) < whole
    assert seconds(Gossip(every=4)) == pytest.approx(seconds(Gossip(every=2)) / 2)


def test_rows_are_divided_once_and_shared_inputs_not() -> None:
    x, mask, labels = torch.arange(14).view(7, 2), torch.ones(3, 3), torch.arange(7)
    parts = [own_rows((x, mask), {"labels": labels, "flag": True}, index, 3) for index in range(3)]
    assert torch.equal(torch.cat([args[0] for args, _ in parts]), x)
    assert torch.equal(torch.cat([kwargs["labels"] for _, kwargs in parts]), labels)
    assert all(args[1] is mask and kwargs["flag"] is True for args, kwargs in parts)
    assert [part_of(7, index, 3) for index in range(3)] == [(0, 3), (3, 2), (5, 2)]


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(OptionsError, match="2 rows for 3 replicas"):
        own_rows((torch.ones(2, 4),), {}, 0, 3)
    with pytest.raises(OptionsError, match="Begin with a batch of 3 rows, or of 6 or more"):
        own_rows((torch.ones(4, 4),), {}, 0, 3, plans=True)
