"""What a choice costs in a step: its computation, its reshards, and what it keeps in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.plan_record import PlanLine, PlanRecord

from .module_tree import move
from .quantities import size


@dataclass(frozen=True, slots=True)
class Cost:
    """One cost of a choice in a step: ``seconds`` (summed over everything it covers) or resting ``bytes`` on a device,
    never both.
    """

    what: str
    detail: str
    seconds: float = 0.0
    bytes: int = 0


_WHAT = {
    "optimizer": "update",
    "offload": "optimizer state to the device and back",
    "swap": "rests in host memory: there and back",
}


def line_costs(plan: PlanRecord, lines: list[PlanLine]) -> Iterator[Cost]:
    """The total of computation, then each kind of reshard, the most expensive first."""
    for kind in ("compute", *_WHAT):
        of_kind = [line for line in lines if line.kind == kind]
        seconds = sum(line.seconds for line in of_kind)
        if seconds:
            phases = " + ".join(dict.fromkeys(line.phase for line in of_kind)) if kind == "compute" else _WHAT[kind]
            yield Cost(kind, f"{len(of_kind)} operations, {phases}" if len(of_kind) > 1 else phases, seconds)
    labels = {
        "exchange": "exchange of rows",
        "reshard": "reshard",
        "weight": "gather",
        "gradient": "grad sync",
        "refresh": "refresh",
    }
    moves: dict[tuple[str, str, str], list[PlanLine]] = {}
    for line in lines:
        if line.kind in labels and line.steps:
            reshard = move(plan, line)
            moves.setdefault((labels[line.kind], reshard.what, reshard.way), []).append(line)
    by_price = sorted(moves.items(), key=lambda item: -sum(line.seconds for line in item[1]))
    for (label, what, changed), group in by_price[:8]:
        count = sum(step.bytes * line.times for line in group for step in line.steps)
        often = sum(line.times for line in group)
        detail = f"{what}  {changed}  {size(count) if count else 'local'}" + (f" in {often}" if often > 1 else "")
        yield Cost(label, detail, sum(line.seconds for line in group))
    others = [line for _, group in by_price[8:] for line in group]
    if others:
        yield Cost("more", f"{len(others)} other reshards", sum(line.seconds for line in others))


def held_bytes(plan: PlanRecord, names: set[str]) -> Iterator[Cost]:
    for kind in ("weight", "gradient", "optimizer", "activation", "input"):
        count = sum(h.bytes for name in names for h in plan.holdings_by_name.get(name, ()) if h.kind == kind)
        if count:
            yield Cost("memory", f"{kind}{'s' if kind == 'activation' else ''}, on each device", bytes=count)
