"""Every model of the zoo, planned and checked: ``python -m benchmarks.zoo [--only NAME ...] [--processes]``.

Each model is planned on meshes (4,) and (2, 2), once as it is cheapest and once on devices so slow that only dividing
the work counts, with parameters fully sharded. Each plan is lowered, run by all ranks in one process in float64, and
compared with one device: loss, every gradient, every buffer, within 1e-8. ``--checks processes`` runs
the same plans on local processes, in float32, and compares with the model itself on one, within 1e-5; without
``simulated`` beside it, only that is measured anew. With ``--output`` the rows of other models that the file has are
kept.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console

from autopar.cluster.description import Cluster
from autopar.cost import usable_bytes
from autopar.cost.compute.op_families import family_of
from autopar.errors import AutoparError
from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.options import Options
from autopar.passes.annotate.annotate import annotate, rule_sources
from autopar.passes.annotate.fold import fold_layers
from autopar.passes.rules import RULES
from autopar.placement.constraints import with_choices, zero_allows
from autopar.placement.formulation import build_instance
from autopar.placement.prices import Prices, local_type
from autopar.solver.solve import solve
from tests.zoo.check import Case, check_assignment, compute_bound, make_case
from tests.zoo.models import ZOO
from tests.zoo.processes import run_on_processes

from .report import describe_machine, make_table

MESHES = ((4,), (2, 2))
CHECKS = ("simulated", "processes")
PHASES = ("annotate", "solve")
Row = dict[str, Any]


def revision() -> str:
    """The commit that is measured, with a plus if the working tree differs from it; empty outside of git."""
    found = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def configurations() -> dict[str, tuple[Cluster, Options]]:
    """How plans are asked for: the cheapest, and one that must shard."""
    fast = Cluster.get("dgx-a100-80gb")
    return {"best": (fast, Options()), "sharded": (compute_bound(fast), Options(zero=3))}


def work(graph: Graph, assignment: Assignment) -> tuple[float, float, dict[str, float]]:
    """The share of FLOPs in operations that the mesh divides, the FLOPs of one device as a share of all, and the shares
    of what is not divided by operation, the largest first."""
    whole = local = 0
    undivided: dict[str, int] = {}
    for node in graph.nodes:
        if node.name not in assignment.strategies or node.is_placeholder:
            continue
        strategy, flops = assignment.strategies[node.name], family_of(node.op).flops
        kinds = tuple(graph.type_of(value) for value in node.operands)
        taken = tuple(local_type(t, p, assignment.mesh) for t, p in zip(kinds, strategy.inputs, strict=True))
        made = zip(node.types, strategy.outputs, strict=True)
        given = tuple(t and local_type(t, p, assignment.mesh) for t, p in made)
        total, here = int(flops(node, kinds, node.types)), int(flops(node, taken, given))
        whole, local = whole + total, local + here
        if here >= total > 0:
            undivided[node.op] = undivided.get(node.op, 0) + total
    whole = max(whole, 1)
    largest = sorted(undivided.items(), key=lambda item: -item[1])[:5]
    return 1 - sum(undivided.values()) / whole, local / whole, {op: count / whole for op, count in largest}


def measure(name: str) -> Row:
    """One row: the model's trace, and all its plans, simulated."""
    start = time.process_time()
    model, batch = ZOO[name]()
    parameters = sum(p.numel() for p in model.parameters())
    case = make_case(model, batch)
    row: Row = {"parameters": parameters, "nodes": len(case.graph.nodes), "revision": revision()}
    row["trace_seconds"] = round(time.process_time() - start, 2)
    row["plans"] = [plan for mesh in MESHES for plan in _plans(case, mesh)]
    return row


def add_processes(name: str, row: Row) -> None:
    """Runs the plans of a row on local processes and notes what came of it."""
    row["processes_revision"] = revision()
    try:
        found = run_on_processes(ZOO[name], MESHES, configurations())
    except (AutoparError, AssertionError, RuntimeError) as error:
        row["processes_failed"] = f"{type(error).__name__}: {str(error)[-500:]}"
        return
    row.pop("processes_failed", None)
    for plan in row["plans"]:
        plan["processes"] = found[tuple(plan["mesh"]), plan["plan"]][:500]


def _plans(case: Case, mesh: tuple[int, ...]) -> Iterator[Row]:
    start = time.process_time()
    annotated = annotate(case.graph, mesh)
    seconds = round(time.process_time() - start, 2)
    sources = rule_sources(annotated, mesh)
    fallbacks = sorted(op for op, said in sources.items() if said[0].startswith("fallback"))
    for kind, (cluster, options) in configurations().items():
        prices = Prices.of(cluster, mesh, annotated)
        row: Row = {"mesh": list(mesh), "plan": kind, "fallbacks": fallbacks, "annotate_seconds": seconds}
        start = time.process_time()
        assignment = solved(annotated, prices, options)
        row["solve_seconds"] = round(time.process_time() - start, 2)
        divided, share, undivided = work(annotated, assignment)
        row |= {"divided_flops": round(divided, 4), "share_of_work": round(share, 4)}
        row["undivided"] = {op: round(part, 4) for op, part in undivided.items() if part >= 1e-4}
        row["simulated"] = _outcome(partial(check_assignment, case, annotated, assignment, prices, kind))
        yield row


def solved(annotated: Graph, prices: Prices, options: Options) -> Assignment:
    """What a planner answers for an annotated graph, without the baselines beside it."""
    limit = float(usable_bytes(prices.cluster))
    instance = build_instance(fold_layers(annotated), prices, optimizer=options.optimizer, memory_limit=limit)
    if options.zero is not None:
        instance = with_choices(instance, zero_allows(instance, options.zero), gathers=options.zero == 3)
    found = solve(
        instance.problem,
        time_limit=options.solver_seconds,
        gap=options.gap,
        seed=options.seed or 0,
        counted=options.time_limit is None,
    )
    return instance.assignment(found.choices)


def _outcome(check: Any) -> str:
    """``equal``, or the first line of what is wrong."""
    try:
        check()
    except (AssertionError, AutoparError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return "equal"


def oracle() -> dict[str, int]:
    """How many operations have rules, and how many of their strategies the rule oracle executes."""
    from tests.oracle.harness import failures

    files = sorted(Path("tests/oracle").glob("samples_*.py"))
    modules = [importlib.import_module(f"tests.oracle.{file.stem}") for file in files]
    skipped = {op for module in modules for op in getattr(module, "NEEDS_CUDA", {})}
    found = [failures(sample) for module in modules for sample in module.SAMPLES if sample.op not in skipped]
    wrong = sum(len(failed) for _, failed in found)
    return {"operations_with_rules": len(RULES), "strategies_executed": sum(n for n, _ in found), "wrong": wrong}


HEADER = ("model", "nodes", "equal", "processes", "divided (4,)", "divided (2, 2)", "trace s", "annotate s", "solve s")


def _cells(name: str, row: Row) -> list[str]:
    if "failed" in row:
        return [name, "", row["failed"].splitlines()[0][:60], *[""] * (len(HEADER) - 3)]
    plans = row["plans"]
    simulated, ran = outcomes(plans, "simulated"), outcomes(plans, "processes")
    sharded = {tuple(plan["mesh"]): plan for plan in plans if plan["plan"] == "sharded"}
    shares = [sharded.get(mesh, {}).get("divided_flops") for mesh in MESHES]
    seconds = [[plan[f"{phase}_seconds"] for plan in plans if f"{phase}_seconds" in plan] for phase in PHASES]
    return [
        name,
        str(row.get("nodes", "")),
        f"{simulated.count('equal')} of {len(simulated)}" if simulated else "",
        f"{ran.count('equal')} of {len(ran)}" if ran else row.get("processes_failed", "")[:60],
        *("" if share is None else f"{share:.1%}" for share in shares),
        f"{row['trace_seconds']:.1f}" if "trace_seconds" in row else "",
        *(f"{max(taken):.1f}" if taken else "" for taken in seconds),
    ]


def outcomes(plans: Sequence[Row], check: str) -> list[str]:
    """What became of the plans that were run so."""
    return [plan[check] for plan in plans if check in plan]


def summary(figures: Mapping[str, Any]) -> str:
    """One sentence for people."""
    rows = figures["models"]
    plans = [plan for row in rows.values() for plan in row.get("plans", ())]
    simulated, ran = outcomes(plans, "simulated"), outcomes(plans, "processes")
    families = sum(bool(outcomes(row.get("plans", ()), "processes")) for row in rows.values())
    most = [p["divided_flops"] for p in plans if p["plan"] == "sharded" and p["mesh"] == [2, 2] and "undivided" in p]
    above = sum(share >= 0.95 for share in most)
    failed = sum("failed" in row for row in rows.values())
    return (
        f"{len(rows)} models, {failed} not planned; {simulated.count('equal')} of {len(simulated)} plans simulated are "
        f"equal to one device in float64, {ran.count('equal')} of {len(ran)} run on processes, of {families} models, "
        f"are equal in float32; at least 95% of the FLOPs divided in {above} of {len(most)} plans that must shard on "
        "(2, 2)"
    )


def document(figures: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    lines = [
        "# The zoo",
        "",
        f"{summary(figures)}.",
        "",
        "Made by `python -m benchmarks.zoo`, see there what each column",
    ]
    lines += ["says; *divided* is the share of FLOPs that the mesh divides in the plan that must shard.", ""]
    if "oracle" in figures:
        counted = figures["oracle"]
        lines += [f"{counted['operations_with_rules']} operations have rules; the rule oracle executes "]
        lines[-1] += f"{counted['strategies_executed']} strategies of theirs, {counted['wrong']} of them wrong."
        lines += [""]
    if figures.get("note"):
        lines += [figures["note"], ""]
    header = (*HEADER, "fallbacks", "largest undivided (2, 2)", "revision", "revision of processes")
    lines += [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    for name, row in sorted(figures["models"].items()):
        lines.append(f"| {' | '.join([*_cells(name, row), *_notes(row)])} |")
    return "\n".join([*lines, ""])


def _notes(row: Row) -> Iterator[str]:
    plans = row.get("plans", ())
    yield ", ".join(sorted({op.removeprefix("aten.") for plan in plans for op in plan.get("fallbacks", ())}))
    last: Row = next(
        (plan for plan in plans if plan["plan"] == "sharded" and plan["mesh"] == [2, 2]), {"undivided": {}}
    )
    large = {op: part for op, part in last.get("undivided", {}).items() if part >= 0.01}
    yield ", ".join(f"{op.removeprefix('aten.')} {part:.0%}" for op, part in large.items())
    yield row.get("revision", "")
    yield row.get("processes_revision", "")


def _known(path: str | None) -> dict[str, Any]:
    if path is None or not Path(path).is_file():
        return {"models": {}}
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


def _keep(figures: dict[str, Any], path: str | None) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints a table, and writes JSON and Markdown where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(ZOO), metavar="NAME", help="these models")
    parser.add_argument("--checks", nargs="*", choices=CHECKS, default=CHECKS[:1], help="how plans are run")
    parser.add_argument("--oracle", action="store_true", help="count the rule oracle's cases")
    parser.add_argument("--output", help="a JSON file to keep figures in")
    parser.add_argument("--document", help="a Markdown file to write the table to")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    figures = _known(chosen.output)
    figures["machine"] = describe_machine()
    if chosen.oracle:
        figures["oracle"] = oracle()
    for name in ZOO if chosen.only is None else chosen.only:
        try:
            if "simulated" in chosen.checks or name not in figures["models"]:
                figures["models"][name] = measure(name)
            if "processes" in chosen.checks:
                add_processes(name, figures["models"][name])
        except (AutoparError, AssertionError, RuntimeError) as error:
            figures["models"][name] = {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
        _keep(figures, chosen.output)
    _keep(figures, chosen.output)
    if chosen.document:
        Path(chosen.document).write_text(document(figures))
    rows = [_cells(name, row) for name, row in sorted(figures["models"].items())]
    Console().print(make_table("the zoo", HEADER, rows, summary(figures)))


if __name__ == "__main__":
    main()
