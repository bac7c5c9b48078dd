"""The text of a plan: at most 40 lines for any model, identical layers folded, communication on lines of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .paths import fold_path
from .plan import Plan, PlanLine, Predicted
from .spec import short

ROWS = 22
MOVES = ("reshard", "weight")


def duration(seconds: float) -> str:
    """``16.6 ms``: three digits and a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.2g} us" if seconds else "0"


def size(count: float) -> str:
    """``5.8 GiB``: three digits and a binary unit."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


@dataclass
class _Row:
    """What one module, or the modules folded into it, does in a step; seconds of all together."""

    paths: set[str] = field(default_factory=set)
    compute: float = 0.0
    moved: float = 0.0
    moves: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))


def plan_text(plan: Plan) -> str:
    """``str(plan)``."""
    return "\n".join([*_head(plan), "", *_table(plan), *_totals(plan), *_foot(plan)])


def _head(plan: Plan) -> Iterator[str]:
    names = ", ".join(f"{name}={n}" for name, n in zip(plan.axis_names, plan.mesh, strict=True))
    yield f"Plan  {plan.model}"
    yield f"mesh  ({names})   placements read ({', '.join(plan.axis_names)}): S(d) shard dim d, R replicate, P partial"
    yield f"priced for {plan.cluster}: {plan.cluster_source.splitlines()[0][:90]}"
    p = plan.predicted
    yield (
        f"status {plan.status.upper()}, gap {plan.gap:.2%}, solved in {duration(plan.solve_seconds)}   predicted step "
        f"{duration(p.step_seconds)}   peak {size(p.peak_bytes)} of {size(plan.memory_limit)} per rank"
    )


def _rows(plan: Plan) -> dict[str, _Row]:
    rows: defaultdict[str, _Row] = defaultdict(_Row)
    for line in plan.lines:
        if line.kind not in ("compute", *MOVES):
            continue
        row = rows[fold_path(line.module)[0]]
        row.paths.add(line.module)
        if line.kind == "compute":
            row.compute += line.seconds
        else:
            row.moved += line.seconds
            move = row.moves[_move(plan, line)]
            move[0] += 1
            move[1] += sum(step.bytes for step in line.steps)
            move[2] += line.seconds
    return dict(rows)


def _move(plan: Plan, line: PlanLine) -> str:
    wires = [step for step in line.steps if step.communicates]
    names = "+".join(dict.fromkeys(f"{s.kind} {'x'.join(plan.axis_names[a] for a in s.axes)}" for s in wires))
    return f"{names or line.steps[0].kind}  {line.steps[0].source} -> {line.steps[-1].target}"


def _weights(plan: Plan) -> Mapping[str, str]:
    found: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for path, place in plan.parameters.items():
        module, _, name = path.rpartition(".")
        if name in ("weight",) or module not in found:
            found[fold_path(module)[0] if module else ""][short(place.weight)] = None
    return {module: "/".join(list(places)[:2]) for module, places in found.items()}


def _outputs(plan: Plan) -> Mapping[str, str]:
    return {fold_path(path)[0]: short(place) for path, place in plan.outputs.items()}


def _table(plan: Plan) -> Iterator[str]:
    rows, weights, outputs = _rows(plan), _weights(plan), _outputs(plan)
    yield f"{'module':<38} {'weight':<14} {'output':<18} {'compute':>10} {'comm':>10}"
    count, left = 0, []
    costly = set(sorted(rows, key=lambda m: -(rows[m].compute + rows[m].moved))[:ROWS])
    for module, row in rows.items():
        lines = list(_module_lines(module, row, weights.get(module, ""), outputs.get(module, "")))
        if module in costly and count + len(lines) <= ROWS:
            count += len(lines)
            yield from lines
        else:
            left.append(row)
    if left:
        rest = f"... {sum(len(r.paths) for r in left)} more modules"
        yield _line(rest, "", "", sum(r.compute for r in left), sum(r.moved for r in left))


def _module_lines(module: str, row: _Row, weight: str, output: str) -> Iterator[str]:
    times = f" x{len(row.paths)}" if len(row.paths) > 1 else ""
    yield _line((module or "(model)") + times, weight, output, row.compute, 0.0)
    for text, (number, moved, seconds) in row.moves.items():
        yield _line(f"  ↳ {text}  {number:.0f} x {size(moved / number)}", None, None, 0.0, seconds)


def _line(name: str, weight: str | None, output: str | None, compute: float, moved: float) -> str:
    figures = f"{duration(compute) if compute else '':>10} {duration(moved) if moved else '':>10}"
    if weight is None or output is None:
        return f"{name[:71]:<72} {figures}"
    return f"{name[-38:]:<38} {weight[:14]:<14} {output[:18]:<18} {figures}"


def _totals(plan: Plan) -> Iterator[str]:
    parts = {
        "compute": plan.seconds_of("compute"),
        "optimizer": plan.seconds_of("optimizer"),
        "reshard": plan.seconds_of("reshard"),
        "weight gather": plan.seconds_of("weight", "refresh"),
        "grad sync": plan.seconds_of("gradient"),
    }
    total = plan.predicted.step_seconds or 1.0
    shown = " · ".join(f"{name} {duration(s)} ({s / total:.0%})" for name, s in parts.items() if s)
    yield f"total      {shown}"
    p = plan.predicted
    yield (
        f"memory     weights {size(p.weight_bytes)} · gradients {size(p.gradient_bytes)} · optimizer {size(p.optimizer_bytes)} · "
        f"activations {size(p.activation_bytes)} · temporary {size(p.temporary_bytes)}"
    )


def _foot(plan: Plan) -> Iterator[str]:
    for position, (name, other) in enumerate(plan.baselines.items()):
        lead = "also priced" if position == 0 else ""
        yield f"{lead:<11}{name:<34} {_compared(plan, other)}"
    for warning in plan.warnings[:3]:
        yield f"warning    {warning[:105]}"
    yield 'ask        plan.why("path") · plan.diff(other) · plan.tree()'


def _compared(plan: Plan, other: Predicted | None) -> str:
    if other is None:
        return "not possible"
    share = other.step_seconds / plan.predicted.step_seconds - 1 if plan.predicted.step_seconds else 0.0
    fits = "" if other.peak_bytes <= plan.memory_limit else f"   does not fit: {size(other.peak_bytes)}"
    return f"{duration(other.step_seconds):>9} {share:+7.0%}{fits}"
