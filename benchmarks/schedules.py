"""Named pipeline schedules compared with the solved one: simulated step time and bubble.

    python -m benchmarks.schedules [--json] [--output FILE]

Times are in units of one equal chunk's forward; a chunk's backward takes twice that, half of it for the input gradient.
Each microbatch holds one unit of memory per chunk. Nothing is measured but the seconds of solving.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.cost import ChunkPrice, EdgePrice, PipelinePrices, simulate
from autopar.schedule.named import SCHEDULES
from autopar.schedule.schedule import chain, loop_placement, v_placement
from autopar.search.schedules.schedule_solver import solve_schedule

from .report import describe_machine, emit, make_table


@dataclass(frozen=True)
class Setting:
    """``first`` and ``last``: times of the first and last chunk, those between take 1. ``wire``: time of a message, all
    of it taking its link. ``memory``: microbatches of a chunk that a rank may hold. ``v``: chunks lie down and up."""

    name: str
    stages: int
    microbatches: int
    chunks: int = 1
    first: float = 1.0
    last: float = 1.0
    wire: float = 0.02
    memory: float | None = None
    v: bool = False

    @property
    def placement(self) -> tuple[int, ...]:
        return v_placement(self.stages) if self.v else loop_placement(self.stages, self.chunks)

    @property
    def prices(self) -> PipelinePrices:
        count = len(self.placement)
        times = [self.first, *[1.0] * (count - 2), self.last]
        chunks = tuple(ChunkPrice(t, t, t, until_weight_gradient=1.0) for t in times)
        return PipelinePrices(chunks, {edge[:2]: EdgePrice(self.wire * 1e-3, 1e-3) for edge in chain(count)})

    @property
    def limits(self) -> tuple[float, ...] | None:
        """Room for the messages that wait is added: they hold a thousandth of a microbatch."""
        return None if self.memory is None else (self.memory + 0.1,) * self.stages


SETTINGS = (
    Setting("equal", 2, 4),
    Setting("equal", 4, 8),
    Setting("equal", 8, 16),
    Setting("equal, 2 chunks", 4, 8, 2),
    Setting("equal, V", 4, 8, 2, v=True),
    Setting("heavy head", 4, 8, last=2.5),
    Setting("heavy embedding", 4, 8, first=2),
    Setting("heavy embedding and head, 2 chunks", 4, 8, 2, first=1.5, last=2.5),
    Setting("heavy head, V", 4, 8, 2, last=2.5, v=True),
    Setting("heavy head, 2 chunks", 8, 16, 2, last=2.5),
    Setting("slow links", 4, 8, wire=1.0),
    Setting("slow links", 8, 16, wire=1.0),
    Setting("tight memory", 4, 8, memory=3),
    Setting("tight memory", 8, 16, memory=5),
    Setting("tight memory, heavy embedding", 4, 16, first=2, memory=3),
    Setting("tight memory, 2 chunks", 4, 8, 2, memory=6),
    Setting("slow links", 8, 32, wire=1.0),
    Setting("slow links, heavy head, 2 chunks", 8, 32, 2, last=1.5, wire=0.5),
)


def measure(setting: Setting) -> dict[str, Any]:
    """Step time and bubble of the named schedules that fit, and of the solved one."""
    prices, edges = setting.prices, chain(len(setting.placement))
    began = time.process_time()
    solved = solve_schedule(prices, setting.placement, setting.microbatches, edges, setting.limits, time_limit=4)
    spent = time.process_time() - began
    return {
        "setting": setting.name,
        "stages": setting.stages,
        "microbatches": setting.microbatches,
        "chunks_per_stage": setting.chunks,
        "named": dict(solved.named),
        "solved": solved.seconds,
        "schedule": solved.schedule.name,
        "bubble": simulate(solved.schedule, prices).bubble,
        "status": solved.status,
        "bound": solved.bound,
        "gap": solved.gap,
        "solve_seconds": round(spent, 2),
    }


def row_of(found: dict[str, Any]) -> list[str]:
    """A line of the table."""
    named = found["named"]
    best = min(named.values(), default=None)
    return [
        f"{found['setting']}, p {found['stages']}, m {found['microbatches']}",
        *(f"{named[name]:.1f}" if name in named else "-" for name in SCHEDULES),
        f"{found['solved']:.1f}",
        f"{100 * found['bubble']:.1f}",
        f"{100 * (best / found['solved'] - 1):.1f}" if best is not None else "-",
        f"{100 * found['gap']:.1f}",
        found["status"],
        f"{found['solve_seconds']:.1f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output")
    options = parser.parse_args(arguments)
    found = []
    for setting in SETTINGS:
        found.append(measure(setting))
        print(" ".join(row_of(found[-1])), file=sys.stderr, flush=True)
    figures = {"benchmark": "schedules", "machine": describe_machine(), "settings": found}
    columns = ["step time", *SCHEDULES, "solved", "bubble %", "gain %", "gap %", "status", "solver s"]
    caption = "gain: over the best named schedule that fits; -: none, or not for these chunks"
    table = make_table("Simulated pipeline schedules", columns, [row_of(one) for one in found], caption)
    emit(figures, table, options.json, options.output)


if __name__ == "__main__":
    main()
