"""Which models of the zoo can be divided into stages and microbatches, and why others cannot.

``python -m benchmarks.refusals [--only NAME ...] [--output FILE.json] [--document FILE.md]``. For each model: whether
its step is divided into two microbatches as it is, so that loss and gradients are those of the batch; whether it is
under ``Options(batch_statistics="microbatch")``; and whether it can be cut into two stages. Where a batch does not
divide by two, its least divisor is taken. With ``--output`` the rows of other models that the file has are kept.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from autopar.arguments import split_batch
from autopar.cluster.description import Cluster
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.options import Options
from autopar.passes.pipeline.cut import cut
from autopar.passes.pipeline.cut_candidates import cut_candidates
from autopar.passes.pipeline.microbatch import Microbatched, microbatch, split_inputs
from autopar.planner.prepare import make_request, prepare
from autopar.planner.step_graphs import graph_alone, pipelined_graph
from tests.zoo.models import ZOO

from .refusal_reasons import REASONS, reason_for
from .report import describe_machine
from .zoo import revision

ACCEPTED = "accepted"
Row = dict[str, Any]
# Where an error stops naming what is wrong and begins to advise.
_ADVICE = "; use "


def measure(name: str) -> Row:
    """One row. An error of the model's trace is its only answer."""
    start = time.process_time()
    model, batch = ZOO[name]()
    args, kwargs = split_batch(batch)
    base = prepare(model.train(), args, kwargs, device="cpu", loss_fn=None, training=True)
    request = make_request(model, base, (2,), Cluster.get("dgx-a100-80gb"), Options())
    graph, inputs = pipelined_graph(request.graph, request.loss, request.batch), split_inputs(request.graph)
    count = divisor(graph, inputs)
    alone = partial(graph_alone, request.graph, request.loss, request.batch, count)
    return {
        "microbatches": count,
        "as_it_is": answer(lambda: microbatch(graph, count, inputs)),
        "own_statistics": answer(lambda: microbatch(graph, count, inputs, alone)),
        "stages": answer(lambda: in_two(microbatch(graph, 1, inputs))),
        "seconds": round(time.process_time() - start, 1),
        "revision": revision(),
    }


def divisor(graph: Graph, inputs: Mapping[str, int | None]) -> int:
    """The least number above 1 that divides the batch; 2 where nothing does."""
    sizes = [int(n.type.shape[d]) for n in graph.placeholders("input") if (d := inputs.get(n.target)) is not None]
    return next((n for n in range(2, min(sizes, default=1) + 1) if all(size % n == 0 for size in sizes)), 2)


def in_two(pieces: Microbatched) -> None:
    """Cuts a graph into two stages at the first place that allows it. Raises :class:`OptionsError` if none does."""
    places = cut_candidates(pieces.graph, 1)
    for place in places:
        try:
            cut(pieces, (place.name,))
        except AutoparError:
            if place == places[-1]:
                raise
        else:
            return


def answer(make: Callable[[], object]) -> str:
    """``accepted``, or why not."""
    try:
        make()
    except AutoparError as error:
        return str(error).partition(": ")[2].partition(_ADVICE)[0] or str(error)
    return ACCEPTED


def summary(rows: Mapping[str, Row]) -> str:
    """One sentence for people."""
    traced = [row for row in rows.values() if "failed" not in row]
    count = Counter(key for row in traced for key in ("as_it_is", "own_statistics", "stages") if row[key] == ACCEPTED)
    return (
        f"{len(rows)} of the {len(ZOO)} models of the zoo, {len(rows) - len(traced)} that cannot be traced; "
        f"{count['as_it_is']} of {len(traced)} are divided into microbatches as they are, {count['own_statistics']} "
        f'under batch_statistics="microbatch", and {count["stages"]} are cut into two stages'
    )


def is_refused(row: Row) -> bool:
    """Whether anything is refused to the model of ``row``."""
    return "failed" in row or {row["as_it_is"], row["own_statistics"], row["stages"]} != {ACCEPTED}


def document(figures: Mapping[str, Any]) -> str:
    """The refusals as Markdown."""
    rows: Mapping[str, Row] = figures["models"]
    refused = {name: row for name, row in sorted(rows.items()) if is_refused(row)}
    missing = sorted(set(ZOO) - set(rows))
    lines = [
        "# Refusals",
        "",
        f"{summary(rows)}.",
        *(["", f"Not asked yet: {', '.join(missing)}."] if missing else []),
        "",
        "Made by `python -m benchmarks.refusals`. *As it is* divides a step so that loss and gradients are those of",
        "the whole batch; what couples samples is refused there, and under",
        '`Options(batch_statistics="microbatch")`, *own statistics*, every microbatch is a batch of its own. Models',
        "that are not listed are accepted throughout.",
        "",
        "## Reasons",
        "",
        *_reasons(refused),
        "## What each model is told",
        "",
        "| model | microbatches | as it is | own statistics | two stages |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in refused.items():
        if "failed" in row:
            lines.append(f"| {name} | | {_cell(row['failed'])} | | |")
        else:
            cells = (row["as_it_is"], row["own_statistics"], row["stages"])
            lines.append(f"| {name} | {row['microbatches']} | {' | '.join(map(_cell, cells))} |")
    return "\n".join([*lines, ""])


def _reasons(refused: Mapping[str, Row]) -> Iterator[str]:
    """For each class of refusals: which models, why, and what can be done."""
    for reason in REASONS:
        models = [name for name in reason.models if name in refused]
        if models:
            yield f"**{reason.title}** ({', '.join(models)}). {reason.why} *What to do:* {reason.remedy}"
            yield ""
    if unknown := [name for name in refused if reason_for(name) is None]:
        yield f"**Not judged** ({', '.join(unknown)}). These may be refused without a reason."
        yield ""


def _cell(reason: str) -> str:
    # Chosen: what is wrong and where, in a cell that can be read.
    return " ".join(reason.split())[:220].replace("|", "\\|")


def _failed(error: Exception) -> str:
    """An error without the folder in which packages are installed."""
    return f"{type(error).__name__}: {re.sub(r'/[^ ]*/site-packages/', '', str(error))[:500]}"


def main(arguments: list[str] | None = None) -> None:
    """Asks every model, and writes JSON and Markdown where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(ZOO), metavar="NAME", help="these models")
    parser.add_argument("--output", help="a JSON file to keep figures in")
    parser.add_argument("--document", help="a Markdown file to write the table to")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    known = Path(chosen.output) if chosen.output else None
    figures: dict[str, Any] = json.loads(known.read_text()) if known and known.is_file() else {"models": {}}
    figures["machine"] = describe_machine()
    for name in sorted(ZOO) if chosen.only is None else chosen.only:
        try:
            figures["models"][name] = measure(name)
        except (AutoparError, RuntimeError) as error:
            figures["models"][name] = {"failed": _failed(error)}
        if known is not None:
            known.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    if chosen.document:
        Path(chosen.document).write_text(document(figures))
    print(summary(figures["models"]))


if __name__ == "__main__":
    main()
