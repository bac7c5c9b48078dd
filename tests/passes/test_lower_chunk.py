"""Chunk programs run by the action lists compute what one device computes: all ranks in one process."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
import transformers

from autopar.ir.reshard import Collective
from autopar.passes.lower.collectives_read_back import collectives_of_stage, difference
from autopar.passes.lower.emit import IN_FLIGHT
from autopar.schedule.check import check
from autopar.search.chunk_price import first_buckets_seconds
from autopar.search.chunks import WirePrice
from autopar.search.pipeline_breakdown import price_stages
from tests.helpers.pipelines import SCHEDULE_NAMES, Wanted, make_pipeline
from tests.helpers.simulate_pipeline import Pipeline
from tests.passes.test_cut import MODELS, _case
from tests.zoo.check import _doubles, compare

transformers.logging.set_verbosity_error()


@_doubles()
def _check(name: str, wanted: Wanted) -> None:
    case = _case(name)
    made = make_pipeline(case.graph, wanted)
    check(made.schedule)
    torch.manual_seed(0)
    found = Pipeline(made.programs(), case.values).step()
    compare(found, case.expected, f"{name} {wanted}")


QUICK = [
    ("gpt2", Wanted((4, 1), "1f1b", 5)),
    ("gpt2", Wanted((2, 2), "interleaved", 2, anywhere=True, seed=1)),
    ("gpt2", Wanted((1, 2), "gpipe", 4)),
    ("t5", Wanted((2, 2), "zb-v", 5, anywhere=True, seed=2)),
    ("unet", Wanted((3, 2), "zb-h1", 4, anywhere=True, seed=3)),
    ("vit", Wanted((2, 3), "1f1b", 2, anywhere=True, seed=4)),
    ("resnet", Wanted((3, 2), "1f1b", 1, seed=5)),
]
REST = [
    (name, Wanted(mesh, schedule, count, seed=seed * 10 + turn, anywhere=True))
    for seed, (name, mesh) in enumerate(product(MODELS, [(4, 1), (2, 2), (3, 2), (2, 2, 2)]))
    for turn, (schedule, count) in enumerate(zip(SCHEDULE_NAMES, (1, 2, 5, 8, 5), strict=True))
]
CASES = [*QUICK, *(pytest.param(*rest, marks=pytest.mark.slow) for rest in REST)]


@pytest.mark.parametrize(("name", "wanted"), CASES, ids=str)
def test_chunks_compute_what_one_device_does(name: str, wanted: Wanted) -> None:
    """Whatever is chosen for every node, wherever it is cut."""
    _check(name, wanted)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("gpt2", Wanted((2, 2), "1f1b", 4, seed=1)),
        ("t5", Wanted((2, 2, 2), "zb-v", 5, seed=2, anywhere=True)),
        ("unet", Wanted((1, 4), "gpipe", 5, seed=3)),
    ],
    ids=str,
)
def test_stages_communicate_what_was_priced(name: str, wanted: Wanted) -> None:
    made = make_pipeline(_case(name).graph, wanted)
    links = {(edge.source, edge.target): WirePrice(1e-5, 1e10) for edge in made.staged.edges}
    breakdown = price_stages(made.chunks, made.wires, made.schedule, made.prices, links, "adamw")
    said = 0
    for stage, held in enumerate(made.schedule.held):
        priced: Counter[Collective] = Counter()
        for line in (line for chunk in held for line in breakdown.breakdowns[chunk].lines):
            for wire in line.collectives:
                priced[wire] += line.times
        found = collectives_of_stage(made.program((stage, *[0] * len(made.prices.mesh))))
        assert difference(found, priced) == ()
        said += sum(found.values())
    assert said > wanted.microbatches


@pytest.mark.parametrize(
    "wanted", [Wanted((2, 2), "1f1b", 2), Wanted((2, 2), "interleaved", 2), Wanted((2, 2), "zb-v", 4)], ids=str
)
def test_no_gradient_waits_for_a_reduction_before_it_is_sent(wanted: Wanted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does any other computation: what a rank computes last in a step is all that awaits reductions. Of the others
    the price knows whether some set out."""
    monkeypatch.setattr("autopar.search.chunk_price.BUCKET_BYTES", 256)
    made = make_pipeline(_case("gpt2").graph, wanted)
    links = {(edge.source, edge.target): WirePrice(1e-5, 1e10) for edge in made.staged.edges}
    breakdown = price_stages(made.chunks, made.wires, made.schedule, made.prices, links, "adamw")
    under_way = []
    for stage in range(made.schedule.stages):
        for chunk in made.program((stage, 0)).chunks.values():
            mine = [i for i in chunk.last.instructions if i.name.startswith("gradients")]
            waits = [i for i in mine if i.op == "collective.wait"]
            if not made.schedule.ends_with(chunk.chunk):
                assert not waits
                under_way.append(len(mine))
                priced = first_buckets_seconds(made.chunks[chunk.chunk].graph, breakdown.breakdowns[chunk.chunk].lines)
                assert (priced > 0) == (len(mine) > 0)
    assert under_way and 0 < max(under_way) <= IN_FLIGHT
