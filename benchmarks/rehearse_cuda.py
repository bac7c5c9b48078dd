"""The programs of all ranks on fake tensors of CUDA, without a GPU: ``python -m benchmarks.rehearse_cuda``.

Each model of the zoo is traced in float32 and under bf16, planned on a mesh (2, 2) as the zoo's benchmark does (*best*
and *sharded*), once more with any strategy for every operation (*random*), and cut into two stages with microbatches,
each divided among two devices (*stages*). Then each rank's training step runs on tensors that have a device and a dtype
but no data (:mod:`autopar.runtime.rehearse.fake_device`). That shows

- that every operation takes its devices and dtypes as far as shape functions tell (they check neither strides nor
  alignment), and that none reads a value, which would wait for the GPU;
- that nothing is made on the processor, but the state that random numbers are drawn from;
- that every collective is one that NCCL has (operation, dtype, contiguous operand), and that all ranks of a stage start
  the same ones in the same order;
- the peak of memory, beside the one that was predicted on meta tensors.

A plan that takes more than ``--limit`` seconds of the processor (random ones of large models do, since every operation
reshards its operands) is left, and its row says so. With ``--output`` the rows of other models that the file has are
kept.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from rich.console import Console

from autopar.arguments import split_batch
from autopar.ir.graph import Graph
from autopar.ir.pipeline_program import PipelineProgram
from autopar.ir.program import Program
from autopar.options import Options
from autopar.passes.annotate.annotate import annotate
from autopar.placement.prices import Prices
from autopar.planner.prepare import Prepared, prepare
from autopar.planner.step_graphs import step_graph
from autopar.precision import Precision
from autopar.runtime.comm import nccl
from autopar.runtime.comm.groups import AxisGroup
from autopar.runtime.rehearse.fake_device import fake_device
from autopar.runtime.rehearse.rehearsal import rehearse
from autopar.torch_internals.modes import TorchDispatchMode
from autopar.torch_internals.trees import tree_leaves
from tests.helpers.lowering import plain
from tests.helpers.pipelines import Wanted, make_pipeline
from tests.zoo.check import prices_for, programs, random_assignment
from tests.zoo.models import ZOO

from .report import describe_machine, make_table
from .time_limit import OutOfTime, time_limit
from .zoo import configurations, solved

MESH = (2, 2)
STAGES = Wanted((2, 2), "1f1b", microbatches=2)
PRECISIONS: tuple[Precision | None, ...] = (None, "bf16")
CUDA = torch.device("cuda", 0)
KINDS = ("best", "sharded", "random", "stages")
# Seconds of the processor for one plan. Chosen: those of most models take less than 10, the random one of T5 more
# than 600.
LIMIT = 60.0
# What torch.distributed sends by NCCL; truth values go as bytes, complex numbers as pairs (`runtime.comm.nccl`).
NCCL_DTYPES = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool, torch.complex64, torch.complex128,
}  # fmt: skip
AnyProgram = Program | PipelineProgram
Row = dict[str, Any]


@dataclass(frozen=True)
class Message:
    """A collective as it is started: ``elements`` of the operand, over mesh ``axes``."""

    kind: str
    op: str
    dtype: torch.dtype
    elements: int
    contiguous: bool
    axes: tuple[int, ...]


@dataclass
class OnProcessor(TorchDispatchMode):
    """Notes operations whose results are on the processor."""

    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and not _draws_from(args):
                self.names.append(str(func))
        return result


def _draws_from(args: Sequence[Any]) -> bool:
    """Whether an operand is the state of random numbers, four integers, or made of it."""
    return any(isinstance(a, torch.Tensor) and a.dtype == torch.int64 and a.numel() <= 4 for a in args)


@contextmanager
def recorded_messages() -> Iterator[list[Message]]:
    """Within, what is sent by NCCL's forms."""
    messages: list[Message] = []

    def recording(kind: str, exchange: Callable[..., Any]) -> Callable[..., Any]:
        def start(tensor: torch.Tensor, *options: Any) -> Any:
            group: AxisGroup = options[-1]
            op = str(options[0]) if len(options) > 1 else ""
            messages.append(Message(kind, op, tensor.dtype, tensor.numel(), tensor.is_contiguous(), group.axes))
            return exchange(tensor, *options)

        return start

    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(patch.object(nccl, kind, recording(kind, getattr(nccl, kind))))
        yield messages


@dataclass(frozen=True)
class Rehearsed:
    """One rank's step on fake tensors: what it sent, its peak in bytes, the predicted one, and what is wrong."""

    messages: tuple[Message, ...]
    peak: int
    predicted: int
    wrong: tuple[str, ...]


def rehearse_rank(program: AnyProgram) -> Rehearsed:
    """The training step of one rank."""
    predicted = rehearse(program, "nccl").peak
    try:
        with fake_device(), recorded_messages() as messages, OnProcessor() as on_processor:
            peak = rehearse(program, "nccl", CUDA).peak
    except Exception as error:
        return Rehearsed((), 0, predicted, (f"{type(error).__name__}: {str(error)[:400]}",))
    wrong = [f"{name} gives a tensor on the processor" for name in dict.fromkeys(on_processor.names)]
    wrong += [f"NCCL cannot {m.kind} {m.dtype}" for m in messages if m.dtype not in NCCL_DTYPES]
    wrong += [f"the operand of {m.kind} is not contiguous" for m in messages if not m.contiguous]
    return Rehearsed(tuple(messages), peak, predicted, tuple(wrong))


def rehearse_each(ranks: Sequence[AnyProgram]) -> list[Rehearsed]:
    """The result of each rank. Of ranks that do the same one runs."""
    ran: list[tuple[AnyProgram, Rehearsed]] = []
    results = []
    for program in ranks:
        work = wherever(program)
        result = next((result for other, result in ran if other == work), None)
        if result is None:
            result = rehearse_rank(program)
            ran.append((work, result))
        results.append(result)
    return results


def wherever(program: AnyProgram) -> AnyProgram:
    """``program`` without its rank's place, but for its stage."""
    if isinstance(program, Program):
        return replace(program, coordinate=())
    chunks = {index: replace(chunk, coordinate=()) for index, chunk in program.chunks.items()}
    prelude = program.prelude and replace(program.prelude, coordinate=())
    return replace(program, coordinate=(program.stage,), chunks=chunks, prelude=prelude)


def unmatched(programs: Sequence[AnyProgram], results: Sequence[Rehearsed]) -> Iterator[str]:
    """Groups of devices whose members start different collectives, or in another order."""
    groups: dict[tuple[Any, Any, Any], list[tuple[Message, ...]]] = {}
    axes = {message.axes for result in results for message in result.messages}
    for program, result in zip(programs, results, strict=True):
        staged = isinstance(program, PipelineProgram)
        stage, place = program.coordinate[:staged], program.coordinate[staged:]
        for over in axes:
            others = tuple(position for axis, position in enumerate(place) if axis not in over)
            own = tuple(message for message in result.messages if message.axes == over)
            groups.setdefault((stage, over, others), []).append(own)
    for (stage, over, others), sent in groups.items():
        if len(set(sent)) > 1:
            yield f"the devices of stage {stage} over axes {over} at {others} start different collectives"


def rehearse_ranks(ranks: Sequence[AnyProgram]) -> Row:
    """All ranks of a plan: how many collectives, peaks, and what is wrong."""
    results = rehearse_each(ranks)
    wrong = [line for result in results for line in result.wrong]
    if not wrong:
        wrong += unmatched(ranks, results)
    fullest = max(results, key=lambda result: result.peak)
    return {
        "collectives": sum(len(result.messages) for result in results),
        "peak_bytes": fullest.peak,
        "predicted_bytes": fullest.predicted,
        "wrong": list(dict.fromkeys(wrong)),
    }


def plans(base: Prepared) -> dict[str, Callable[[], Row]]:
    """The plans of a traced model: what each is called, and its rehearsal."""
    graph = step_graph(base.graph, base.loss, base.batch)
    annotated = annotate(graph, MESH)
    found: dict[str, Callable[[], Row]] = {}
    for kind, (cluster, options) in configurations().items():
        found[kind] = partial(_solved, annotated, Prices.of(cluster, MESH, annotated), options)
    return {**found, "random": partial(_random, annotated), "stages": partial(_staged, graph)}


def _solved(annotated: Graph, prices: Prices, options: Options) -> Row:
    return rehearse_ranks(programs(annotated, solved(annotated, prices, options), prices))


def _random(annotated: Graph) -> Row:
    return rehearse_ranks(programs(annotated, random_assignment(annotated, MESH, 0), prices_for(annotated, MESH)))


def _staged(graph: Graph) -> Row:
    return rehearse_ranks(make_pipeline(plain(graph), STAGES).programs())


def measure(name: str, precision: Precision | None, limit: float = LIMIT, kinds: Sequence[str] = KINDS) -> list[Row]:
    """A row for each plan, of those ``kinds``, of one model under one precision."""
    model, batch = ZOO[name]()
    args, kwargs = split_batch(batch)
    base = prepare(model.train(), args, kwargs, device="cuda", loss_fn=None, training=True, precision=precision)
    rows = []
    possible = plans(base)
    for kind in kinds:
        start = time.process_time()
        row: Row = {"model": name, "precision": precision or "fp32", "plan": kind}
        try:
            with time_limit(limit, processor=True):
                row |= possible[kind]()
        except (Exception, OutOfTime) as error:
            row["left" if isinstance(error, OutOfTime) else "not_planned"] = _said(error)
        rows.append({**row, "seconds": round(time.process_time() - start, 2)})
    return rows


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def all_rows(names: Sequence[str], limit: float, kinds: Sequence[str]) -> Iterator[Row]:
    """Every model under every precision; a model that cannot be traced is a row too."""
    for name in names:
        for precision in PRECISIONS:
            try:
                yield from measure(name, precision, limit, kinds)
            except Exception as error:
                yield {"model": name, "precision": precision or "fp32", "plan": "", "not_planned": _said(error)}


def summary(rows: Sequence[Row]) -> str:
    """One sentence for people."""
    ran = [row for row in rows if "wrong" in row]
    fine = [row for row in ran if not row["wrong"]]
    off = [abs(row["peak_bytes"] / row["predicted_bytes"] - 1) for row in fine if row["predicted_bytes"]]
    equal = sum(row["peak_bytes"] == row["predicted_bytes"] for row in fine)
    left = sum("left" in row for row in rows)
    return (
        f"{len(ran)} plans of {len({row['model'] for row in ran})} models rehearsed on fake tensors of CUDA, "
        f"{len(fine)} without a complaint, {sum(row['collectives'] for row in ran)} collectives; the peak is the "
        f"predicted one in {equal}, and at most {max(off, default=0.0):.1%} off in the others; "
        f"{len(rows) - len(ran) - left} plans could not be made, {left} were left at the time limit"
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    said = row.get("not_planned") or row.get("left") or "; ".join(row.get("wrong", ())) or "fine"
    peak = f"{row['peak_bytes']} / {row['predicted_bytes']}" if "peak_bytes" in row else ""
    return [row["model"], row["precision"], row["plan"], str(row.get("collectives", "")), peak, said[:150]]


def main(arguments: list[str] | None = None) -> None:
    """Rehearses, prints a table, and writes JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(ZOO), metavar="NAME", help="these models")
    parser.add_argument("--plans", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help="these plans")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of the processor for a plan (%(default)s)")
    parser.add_argument("--output", help="a JSON file to write the figures to")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    names = sorted(ZOO) if chosen.only is None else chosen.only
    rows = [row for row in _known(chosen.output) if row["model"] not in names or row["plan"] not in chosen.plans]
    for row in all_rows(names, chosen.limit, chosen.plans):
        rows.append(row)
        rows.sort(key=lambda row: (row["model"], row["precision"]))
        if chosen.output:
            figures = {"machine": describe_machine(), "summary": summary(rows), "plans": rows}
            Path(chosen.output).write_text(json.dumps(figures, indent=1) + "\n")
    header = ("model", "precision", "plan", "collectives", "peak / predicted", "")
    Console().print(make_table("rehearsed on fake CUDA", header, list(map(_cells, rows)), summary(rows)))


def _known(path: str | None) -> list[Row]:
    if path is None or not Path(path).is_file():
        return []
    found: list[Row] = json.loads(Path(path).read_text())["plans"]
    return found


if __name__ == "__main__":
    main()
