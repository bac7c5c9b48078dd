"""Processes of unequal speed: the plan that is found beside the equal division, and beside plans cut by hand.

    sudo python -m benchmarks.unequal [--rounds 3] [--steps 2] [--json] [--output FILE]

Four local processes stand for machines: each is held to a share of a core by a quota of its control group
(:mod:`.throttle`) while steps are timed, not while they are planned and compiled. The cluster is what they measure of
themselves and of their messages, each held to its share, as ``autopar calibrate`` does. All plans live in one run and
take turns; a step is forward, backward and AdamW, as long as on the slowest process. The same plans are priced, so
predictions stand beside measurements.

*Equal*: what the planner finds if it is told that all devices are alike, equally many layers on each, and data
parallelism. *By hand*: the layers of each rank, or of each pair of ranks, the number of microbatches and the schedule
are fixed, or the rows of each rank; the rest is the planner's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import Options
from autopar.calibration.combine_samples import mean
from autopar.calibration.fit_processes import fit_cluster, fit_processes
from autopar.calibration.measure_process import measure_rounds
from autopar.calibration.samples import Samples
from autopar.cluster.description import Cluster, Group

from .local_ranks import run_as_ranks
from .pipeline_plans import BATCH, SEQUENCE, make_batch, make_model, make_step
from .report import describe_machine, emit, make_table
from .step_time import measure
from .throttle import throttled

# Shares of a core. Their sum leaves a fifth of two cores to other programs, so that quotas bind, not the machine.
SHARES = (0.6, 0.6, 0.2, 0.2)
LAYERS = 8
# As long as ``autopar calibrate`` takes by default, without starting processes.
CALIBRATION_SECONDS = 28.0
FOUND = "found"
LOSS_TOLERANCE = 1e-4
EQUAL: Mapping[str, Options] = {
    "equal: told that all are alike": Options(),
    "equal: data parallelism": Options(stages=1, zero=0),
    "equal: 2 layers each, 1f1b, 8 microbatches": Options(),
}


def _cut(layers: Sequence[int], ranks: Sequence[int], schedule: str, microbatches: int) -> Options:
    """``layers[i]`` layers, in the order of the model, on the stage ``ranks[i]``."""
    places = [rank for rank, count in zip(ranks, layers, strict=True) for _ in range(count)]
    pins = {f"transformer.h.{layer}": f"stage {rank}" for layer, rank in enumerate(places)}
    return Options(stages=len(set(ranks)), schedule=schedule, microbatches=microbatches, pins=pins)


def _rows(shares: Sequence[int], zero: Literal[0, 1]) -> Options:
    """Data parallelism in which the ranks have rows in these shares."""
    return Options(stages=1, zero=zero, pins={"transformer": f"S(0:{'+'.join(map(str, shares))})"})


_INORDER, _SLOW_FIRST = (0, 1, 2, 3), (2, 3, 0, 1)
BY_HAND: Mapping[str, Options] = {
    "layers 3 3 1 1, 1f1b, 8 microbatches": _cut((3, 3, 1, 1), _INORDER, "1f1b", 8),
    "layers 3 3 1 1, zb-h1, 8 microbatches": _cut((3, 3, 1, 1), _INORDER, "zb-h1", 8),
    "layers 4 2 1 1, 1f1b, 8 microbatches": _cut((4, 2, 1, 1), _INORDER, "1f1b", 8),
    "layers, slow first: 1 1 3 3, 1f1b, 8 microbatches": _cut((1, 1, 3, 3), _SLOW_FIRST, "1f1b", 8),
    "layers of pairs: 6 2, 1f1b, 4 microbatches": _cut((6, 2), (0, 1), "1f1b", 4),
    "layers of pairs: 3 1 1 3, zb-v, 4 microbatches": _cut((3, 1, 1, 3), (0, 1, 1, 0), "zb-v", 4),
    "rows 6 6 2 2": _rows((6, 6, 2, 2), 0),
    "rows 6 6 2 2, state in shards": _rows((6, 6, 2, 2), 1),
    "rows 5 5 3 3": _rows((5, 5, 3, 3), 0),
    "rows 7 7 1 1": _rows((7, 7, 1, 1), 0),
}


def measured_clusters(rank: int) -> tuple[Cluster, Cluster]:
    """The cluster of these processes, and one whose devices are alike, as :func:`clusters` makes them from what every
    process measures while it is held to its share. Collective."""
    with throttled(SHARES[rank]):
        own = measure_rounds(rank, len(SHARES), CALIBRATION_SECONDS)
    samples: list[Samples] = [own] * len(SHARES)
    dist.all_gather_object(samples, own)
    return clusters(samples)


def clusters(samples: Sequence[Samples]) -> tuple[Cluster, Cluster]:
    """From what each process measured: the cluster with a group for those of each share, and one whose devices are
    alike, each as slow as the mean."""
    # Fast processes wait for slow ones when they meet, which is no price of messages, and no slowness of theirs.
    least = min(each.synchronisation for each in samples)
    samples = [replace(each, synchronisation=least, step=each.own_step, update=each.own_update) for each in samples]
    fitted = fit_cluster(samples, 1)
    held = f"processes held to {', '.join(map(str, SHARES))} of a core"
    # With a quota of its own a process does not share its core.
    alike = replace(fitted, name="alike", sharing=1, cores=1.0, source=f"{held}; {fitted.source}")
    of_share = {share: [own for own, held in zip(samples, SHARES, strict=True) if held == share] for share in SHARES}
    kinds = (Group(len(own), fit_processes(mean(own), 1, 1, 1.0)[0].device) for own in of_share.values())
    return replace(alike, name="unequal").with_groups(*kinds), alike


def asked(unequal: Cluster, alike: Cluster) -> Mapping[str, tuple[Options, Cluster]]:
    """Every plan's options, and the cluster that it is planned for."""
    equal = {**EQUAL, [*EQUAL][-1]: _cut((2, 2, 2, 2), _INORDER, "1f1b", 8)}
    return {
        FOUND: (Options(), unequal),
        **{name: (options, alike) for name, options in equal.items()},
        **{name: (options, unequal) for name, options in BY_HAND.items()},
    }


def run(arguments: argparse.Namespace) -> None:
    """What each process does."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh, batch = init_device_mesh("cpu", (len(SHARES),)), make_batch()
    models, steps, losses = {}, {}, {}
    unequal, alike = measured_clusters(dist.get_rank())
    for name, (options, cluster) in asked(unequal, alike).items():
        if arguments.only and name not in arguments.only:
            continue
        model = models[name] = autopar.parallelize(make_model(), mesh, options=options, cluster=cluster)
        steps[name] = make_step(model, model.optimizer(torch.optim.AdamW, lr=1e-4, foreach=False), batch)
        losses[name] = [float(steps[name]()) for _ in range(2)]
    expected = next(iter(losses.values()))
    for name, found in losses.items():
        error = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
        if error > LOSS_TOLERANCE:
            raise RuntimeError(f"{name} trains otherwise: losses differ by {error:.1e} (relative)")
    with throttled(SHARES[dist.get_rank()]):
        seconds = measure(steps, arguments.rounds, arguments.steps, "cpu")
    if dist.get_rank() == 0:
        report(models, {name: statistics.median(found) for name, found in seconds.items()}, unequal, arguments)
    dist.barrier()
    dist.destroy_process_group()


def layers_of(plan: autopar.Plan) -> str:
    """The layers of each stage, by the share of their operations: ``3 3 1 1``, or ``2.6 3.4`` where one is cut."""
    if plan.stages == 1:
        rows = next(filter(None, plan.shares), ())
        return f"all; rows {' '.join(str(BATCH * n // sum(rows)) for n in rows)}" if rows else "all"
    counts = [0] * plan.stages
    for line in plan.lines:
        counts[line.stage] += line.kind == "compute" and line.module.startswith("transformer.h.")
    return " ".join(f"{LAYERS * count / sum(counts):.2g}" for count in counts)


def _row(name: str, seconds: float, plan: autopar.Plan, found: float) -> tuple[str, ...]:
    times = f"{seconds * 1e3:.0f}", f"{plan.predicted.step_seconds * 1e3:.0f}", f"{seconds / found:.2f}"
    return name, *times, layers_of(plan), f"{plan.schedule} x {plan.microbatches}"


def report(
    models: Mapping[str, Any], measured: Mapping[str, float], unequal: Cluster, arguments: argparse.Namespace
) -> None:
    """Prints and writes the figures."""
    plans = {name: model.plan for name, model in models.items()}
    found, hands = measured[FOUND], [seconds for name, seconds in measured.items() if name in BY_HAND]
    equals = [seconds for name, seconds in measured.items() if name in EQUAL]
    figures = {
        "benchmark": "unequal",
        "model": f"GPT-2, {LAYERS} layers, width 256, batch {BATCH} x {SEQUENCE}, fp32, AdamW, {len(SHARES)} processes",
        "shares_of_a_core": list(SHARES),
        "throttled_by": "quotas of control groups",
        "cluster": f"{unequal.name}: {unequal.source}",
        "machine": describe_machine(),
        "found_over_best_by_hand": found / min(hands, default=found),
        "best_equal_over_found": min(equals, default=found) / found,
        "plans": {
            name: {
                "measured_seconds": measured[name],
                "predicted_seconds": plan.predicted.step_seconds,
                "stages": plan.stages,
                "layers": layers_of(plan),
                "schedule": plan.schedule,
                "rows": list(next(filter(None, plan.shares), ())),
                "microbatches": plan.microbatches,
            }
            for name, plan in plans.items()
        },
    }
    names = sorted(measured, key=measured.__getitem__)
    rows = [_row(name, measured[name], plans[name], found) for name in names]
    caption = (
        f"Found: {figures['found_over_best_by_hand']:.2f} times the best by hand; the best equal division takes "
        f"{figures['best_equal_over_found']:.2f} times the found one"
    )
    columns = ("plan", "ms", "predicted", "/ found", "layers", "schedule")
    emit(figures, make_table("unequal processes", columns, rows, caption), arguments.json, arguments.output)


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command."""
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each plan (default: 3)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="steps of a turn (default: 2)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these plans")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", metavar="FILE", help="also write the JSON to FILE")
    arguments = parser.parse_args(words)
    return run_as_ranks("benchmarks.unequal", words, len(SHARES), lambda: run(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
