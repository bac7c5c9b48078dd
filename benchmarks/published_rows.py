"""Published rows as questions: the model's shape, the layout, the cluster; a reason where one cannot be asked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.schedule.named import SCHEDULES
from benchmarks.emulator.space import Space

from .published_beside import heads_seconds, metrics_seconds, rows_seconds, stalled_seconds
from .published_clusters import cluster_of
from .published_fields import check_fields, shown
from .published_flops import published_seconds
from .published_known import completed
from .published_open import is_open, known_of_method, space_of
from .published_recipes import beyond, cut
from .published_shape import NotExpressible, Shape, number
from .published_systems import DROPOUT, FUSED_GRADIENTS, UNFUSED, eager, habits, overlap, system
from .recipes import Recipe

# Schedules by words of their names, the first that is found; None: the usual one for the number of chunks.
WORDS = (
    (r"gpipe", "gpipe"),
    (r"zb-?h1", "zb-h1"),
    (r"zb-?v", "zb-v"),
    (r"1f1b|interleaved|pipedream", None),
)
# How many moments optimizers keep of each element, by words of their names, the first that is found; and those whose
# moments are of fewer bytes or elements, which no layout has.
FEWER_BYTES = r"\d.?bit|mini|galore"
MOMENTS: tuple[tuple[str, int], ...] = (
    (r"adafactor", 0),
    (r"lion", 1),
    (r"adam(w|ax)?(?![a-z])|\blamb\b", 2),
    (r"\bsgd\b.*((no|without) momentum|momentum\W*0(\.0*)?(?![\d.]))", 0),
    (r"\bsgd\b.*(momentum|nesterov)|momentum", 1),
    (r"\bsgd\b", 0),
)


@dataclass(frozen=True)
class PublishedCase:
    """One row, ready to be priced. Where it leaves its layout open ``space`` is what it allows, and ``layout`` what is
    known besides."""

    row: Mapping[str, Any]
    shape: Shape
    layout: Recipe
    batch: int
    cluster: Cluster
    seconds: float | None
    oom: bool | None
    space: Space | None = None

    @property
    def devices(self) -> int:
        return self.layout.devices if self.space is None else number(self.row["cluster"], "n_gpus")

    @property
    def beside_seconds(self) -> float:
        """Seconds of the step that its trainer spent beside training."""
        logits = self.batch * self.shape.seq * self.shape.vocab / self.devices
        metrics = metrics_seconds(self.row, self.cluster, logits)
        stalled = stalled_seconds(self.row, self.layout, self.batch)
        experts, width = self.shape.experts, self.shape.hidden
        tokens = self.batch * self.shape.seq * self.shape.layers / self.devices
        normed = heads_seconds(self.row, self.cluster, self.shape, tokens)
        return metrics + stalled + normed + rows_seconds(self.row, self.cluster, experts, width, self._rows)

    @property
    def _rows(self) -> float:
        """Rows that a device's experts are sent in a step, in all layers."""
        experts, shape = self.shape.experts, self.shape
        if experts is None:
            return 0.0
        blocks = sum(map(experts.in_layer, range(shape.layers)))
        return self.batch * shape.seq * experts.chosen * blocks / self.devices

    @property
    def sweep(self) -> tuple[object, ...]:
        """Rows of one sweep measure one model, batch and cluster under several layouts."""
        experts = self.shape.experts and replace(self.shape.experts, group=0, wide_masks=False)
        measured = replace(self.shape, flash=True, upcast=False, dropout=False, experts=experts, one_hot=False)
        said = json.dumps([self.row.get("source"), self.row["cluster"]], sort_keys=True)
        return said, measured, self.batch, self.devices


def read_rows(path: Path) -> Iterator[Mapping[str, Any] | NotExpressible]:
    """The rows of a file, and in place of a line that is none the reason."""
    # A file may begin with a byte order mark, and a line may hold characters that ``splitlines`` takes for its end.
    for at, line in enumerate(path.read_text(encoding="utf-8-sig", errors="replace").split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield NotExpressible(f"line {at} is no JSON: {error}")
                continue
            yield row if isinstance(row, Mapping) else NotExpressible(f"line {at} is no JSON object")


def case_of(row: Mapping[str, Any]) -> PublishedCase:
    """Raises :class:`NotExpressible` with the reason why a row cannot be priced."""
    if "lora" in str(row.get("table")).lower():
        raise NotExpressible("LoRA: most weights do not learn")
    if row.get("kind"):
        raise NotExpressible(f"kind {row['kind']}: no training step")
    check_fields(row)
    try:
        return _case(completed(row))
    except OptionsError as error:
        raise NotExpressible(str(error)) from error
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise NotExpressible(f"a field is not what it should be: {type(error).__name__}: {error}") from error


def _case(row: Mapping[str, Any]) -> PublishedCase:
    oom, seconds = row["measured"].get("oom"), None
    try:
        seconds = published_seconds(row)
    except NotExpressible:
        if not oom:
            raise
    if seconds is not None and not 0 < seconds < math.inf:
        raise NotExpressible(f"a step of {seconds} seconds")
    # Torch's own attention in training code normalises scores in fp32, operation by operation; fused kernels inside.
    upcast = row["parallel"].get("attention_kernel") == "torch"
    dropout = bool(re.search(DROPOUT, system(row)) or row["model"].get("dropout"))
    shape = Shape.of(row["model"], flash=_is_flash(row), upcast=upcast, dropout=dropout, beyond=beyond(row))
    if not row["parallel"].get("global_batch"):
        raise NotExpressible("no global batch: parallel.global_batch is not given")
    batch = number(row["parallel"], "global_batch")
    if is_open(row["parallel"]):
        known = known_fields(row)
        schedule = _schedule(row["parallel"].get("schedule"))
        like = Recipe(**{**known, "expert": 1, "zero": 0, "schedule": schedule})
        return PublishedCase(
            row=row,
            shape=shape,
            layout=like,
            batch=batch,
            cluster=cluster_of(row),
            seconds=seconds,
            oom=oom,
            space=space_of(row, known),
        )
    layout = layout_of(row)
    layout.microbatches(batch)
    return PublishedCase(
        row=row, shape=shape, layout=layout, batch=batch, cluster=cluster_of(row), seconds=seconds, oom=oom
    )


def _is_flash(row: Mapping[str, Any]) -> bool:
    """Whether attention ran as one kernel: said so, or newer than the kernel's adoption (2023) by device or source (of
    several years the first: a paper may be printed later)."""
    parallel = row["parallel"]
    said = " ".join(str(parallel.get(k, "")) for k in ("attention_kernel", "attention", "recompute"))
    if "flash" in said:
        return True
    if parallel.get("attention_kernel") or re.search(UNFUSED, system(row)):
        return False
    years = [int(y) for y in re.findall(r"\b20[12]\d\b", str(row.get("source", "")))]
    newer = re.search(r"H100|H200|B200|B300|GB200|GB300|TPU|MI3", str(row["cluster"].get("gpu", "")))
    return bool(newer) or bool(years and min(years) >= 2023)


def layout_of(row: Mapping[str, Any]) -> Recipe:
    """The layout of a row that gives it; what it leaves out follows from its number of devices. Raises
    :class:`OptionsError`."""
    parallel = row["parallel"]
    tensor, pipeline, context = number(parallel, "t"), number(parallel, "p"), number(parallel, "cp", 1)
    devices = number(row["cluster"], "n_gpus", tensor * pipeline * context * number(parallel, "d", 1))
    data = number(parallel, "d", max(1, devices // (tensor * pipeline * context)))
    if tensor * pipeline * context * data != devices:
        d = f"d {data}" if parallel.get("d") else "any d"
        raise NotExpressible(f"t {tensor} x p {pipeline} x cp {context} x {d} is not n_gpus {devices}")
    whole = parallel.get("per_device_batch") or parallel.get("local_batch")
    microbatch = parallel.get("microbatch") or (whole if pipeline == 1 else 1)
    schedule = _schedule(parallel.get("schedule"))
    chunks = SCHEDULES[schedule].least if schedule else 1
    said: dict[str, Any] = {
        "tensor": tensor,
        "pipeline": pipeline,
        "data": data,
        "microbatch": number({"microbatch": microbatch}, "microbatch"),
        "interleave": number(parallel, "interleave", chunks) if pipeline > 1 else 1,
        "schedule": schedule if pipeline > 1 else None,
    }
    known = known_fields(row)
    ends = cut(row, pipeline * said["interleave"])
    return Recipe(**{**known, **said, **ends, "sequence_parallel": known["sequence_parallel"] and tensor > 1})


def known_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a row's layout that do not depend on how devices are divided."""
    parallel = row["parallel"]
    said = {
        "context": number(parallel, "cp", 1),
        "expert": _expert(parallel, number(parallel, "t", 1)),
        "capacity": float(parallel.get("capacity_factor") or 1.0),
        **{name: number(row["model"], name, 0) for name in ("expert_groups", "chosen_groups")},
        "recompute": _recompute(parallel.get("recompute")),
        "sequence_parallel": bool(parallel.get("sequence_parallel")),
        "zero": _zero(parallel.get("zero_stage"), number(parallel, "p", 1)),
        "precision": _precision(parallel.get("precision")),
        "overlap": overlap(row),
        "eager": eager(row),
        "gradient_accumulation_fusion": bool(re.search(FUSED_GRADIENTS, system(row))),
        "offload": bool(parallel.get("cpu_offload_optimizer")),
        "moments": _moments(str(parallel.get("optimizer") or "adam").lower()),
    }
    return {**said, **habits(row), **known_of_method(parallel)}


def _expert(parallel: Mapping[str, Any], tensor: int) -> int:
    """Ranks among which experts are divided besides tensor ranks: these have experts of their own, or a share of each
    (``etp``)."""
    said = number(parallel, "ep", 1)
    return said if number(parallel, "etp", 1) == tensor or said % tensor else said // tensor


def _precision(said: object) -> Any:
    words = str(said or "bf16").lower()
    # Torch's product of fp8 scaled by rows gains far less than scaled by tensors (torchao's own figures: a third).
    if "fp8" in words:
        return "bf16" if "rowwise" in words else "fp8"
    found = next((kind for kind in ("bf16", "fp16", "fp32") if kind in words), None)
    if found is None:
        raise NotExpressible(f"parallel.precision is {shown(said)}: no layout has it; one of bf16, fp16, fp32, fp8")
    return found


def _recompute(said: object) -> Any:
    if "SAC" in str(said):
        return "operations"
    kinds = ("none", "selective", "elementwise", "full")
    found = next((kind for kind in kinds if str(said or "none").lower().startswith(kind)), None)
    if found is None:
        raise NotExpressible(f"parallel.recompute is {shown(said)}: no layout has it; one of {', '.join(kinds)}")
    return found


def _schedule(said: object) -> str | None:
    """The name of a schedule; None for 1F1B, interleaved or not, which follows from the number of chunks."""
    words = str(said or "1f1b").lower()
    for pattern, name in WORDS:
        if re.search(pattern, words):
            return name
    raise NotExpressible(f"parallel.schedule is {shown(said)}: no layout has it; one of 1f1b, gpipe, zb-h1, zb-v")


def _moments(said: str) -> int:
    """How many moments of each element the optimizer of a row keeps; where it says nothing Adam's. Raises
    :class:`NotExpressible` for one that is not known."""
    found = None if re.search(FEWER_BYTES, said) else next((n for word, n in MOMENTS if re.search(word, said)), None)
    if found is None:
        raise NotExpressible(f"optimizer {said}: how many moments it keeps is not known")
    return found


def _zero(said: object, pipeline: int) -> Any:
    """Fully sharded weights stay gathered through a step where stages would gather them for every microbatch."""
    if said is None or said is False:
        return 0
    found = re.fullmatch(r"([0-3])(?![\d.]).*|.*\bzero-?([0-3])\b.*", str(said).lower())
    if found is not None:
        return int(found[1] or found[2])
    if "FSDP" in str(said):
        return 3 if pipeline == 1 else 2
    raise NotExpressible(f"parallel.zero_stage is {shown(said)}, neither a stage from 0 to 3 nor FSDP")
