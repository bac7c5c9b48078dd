"""The rows of the page's tables: stages, parameters, baselines."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

from autopar.ir.module_paths import fold_path
from autopar.ir.placements import short
from autopar.ir.plan_record import PlanRecord
from autopar.plans.views.module_tree import numbers, optimizer_text
from autopar.plans.views.quantities import duration, share, size
from autopar.plans.views.stage_table import ranks_text, stage_groups
from autopar.plans.views.stages import folded_modules
from autopar.plans.views.why import explain


def stage_table(plan: PlanRecord) -> list[tuple[str, ...]]:
    """A row for each group of equal stages."""
    rows: list[tuple[str, ...]] = []
    for group in stage_groups(plan):
        first = group[0]
        chunks = [[module for row in group for module in row.modules[i]] for i in range(len(first.modules))]
        rows.append(
            (
                numbers([str(row.stage) for row in group]) + (" each" if len(group) > 1 else ""),
                ranks_text(group),
                " | ".join(map(folded_modules, chunks)),
                duration(first.forward),
                duration(first.backward),
                duration(first.busy),
                share(first.busy, plan.predicted.step_seconds),
                size(first.peak),
            )
        )
    return rows


def baseline_rows(plan: PlanRecord) -> list[tuple[str, ...]]:
    """The other plans that were priced, the fastest first."""
    step = plan.predicted.step_seconds
    rows: list[tuple[str, ...]] = []
    for name, other in sorted(plan.baselines.items(), key=lambda item: item[1].step_seconds if item[1] else math.inf):
        if other is None:
            rows.append((name, "not possible", "", ""))
            continue
        longer = f"{other.step_seconds / step - 1:+.0%}".replace("-0%", "+0%") if step else ""
        fits = "" if other.peak_bytes <= plan.least_limit else ", does not fit"
        rows.append((name, duration(other.step_seconds), longer, f"{size(other.peak_bytes)}{fits}"))
    return rows + [(name, "excluded", "", why) for name, why in plan.excluded.items()]


def parameter_rows(plan: PlanRecord) -> list[Mapping[str, Any]]:
    """A row for the parameters of equal layers that have equal types and placements, for the same reason."""
    groups: dict[Hashable, list[str]] = {}
    for path, place in plan.parameters.items():
        node = plan.parameter_nodes.get(path, "")
        about = plan.nodes[node].type if node else ""
        pinned = (path in plan.pinned, plan.pinned.get(node, ""))
        groups.setdefault((fold_path(path)[0], about, place, pinned), []).append(path)
    return [_parameter_row(plan, paths) for paths in groups.values()]


def _parameter_row(plan: PlanRecord, paths: list[str]) -> Mapping[str, Any]:
    place, why = plan.parameters[paths[0]], explain(plan, paths[0])
    return {
        "path": folded_modules(paths),
        "type": why.about,
        "weight": short(place.weight),
        "gradient": short(place.gradient),
        "optimizer": optimizer_text(place),
        "reason": why.reason,
        "others": why.alternatives.cheapest if why.alternatives is not None else (),
    }
