"""Rows that leave their layout open: the space of layouts that their method allows, and which of it is chosen.

A row may name a method (Megatron's grid of degrees, ZeRO-3, Alpa's automatic plans) or only some degrees. Everything it
leaves open is chosen by the search over layouts that planning uses (:mod:`benchmarks.emulator.search`), within what the
method allows: the quickest by our prices that fits into memory, and the leanest where none fits. That need not be the
layout that ran.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.cluster.description import Cluster
from autopar.given_fields import own_fields
from autopar.layout import divisors
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.price import Priced
from benchmarks.emulator.space import Space
from benchmarks.emulator.trials import LayoutSearch

from .published_shape import NotExpressible, number
from .recipes import Recipe

# Sizes of microbatches that are tried where a row does not say.
MICROBATCHES = (1, 2, 4, 8, 16)
# What rows call the fields of a layout that are searched.
NAMES = {
    "t": "tensor",
    "p": "pipeline",
    "d": "data",
    "ep": "expert",
    "microbatch": "microbatch",
    "interleave": "interleave",
    "recompute": "recompute",
    "sequence_parallel": "sequence_parallel",
    "zero_stage": "zero",
}


@dataclass(frozen=True)
class Method:
    """The layouts that a method allows, and fields that are known of all of them."""

    space: Space
    known: Mapping[str, Any] = field(default_factory=dict)


# Alpa as of its artifact (github.com/alpa-projects/alpa, osdi22_artifact and benchmark/alpa): gradients are kept and
# added up in fp16, as weights are (model_util.TrainState); collectives and messages are operations of XLA's one stream
# (they came to overlap later: Zhuang et al. 2023); gradients are reduced once a step, by reduce-scatter. Its stages
# have one chunk each, which end between any two operations; activations are not divided along the sequence. XLA's
# fusions end at reductions, so that a softmax reads and writes by itself, and its buffers are laid out beforehand.
_ALPA = {
    "gradients": "own",
    "gradient_accumulation_fusion": False,
    "overlap": (),
    "cuts": "operations",
    "eager": ("*scores.normalised",),
    "allocation": "static",
}
# What systems of these rows could compute again.
OFFERED = Space(recompute=("none", "selective", "full"))
_PLAIN = replace(OFFERED, interleave=(1,), sequence_parallel=(False,))


def _alpa(**values: Any) -> Method:
    return Method(replace(_PLAIN, **{"zero": (2, 3), **values}), _ALPA)


METHODS: Mapping[str, Method] = {
    # Its version of autumn 2021: no distributed optimizer, gradients in fp16 added up beside their products.
    "megatron": Method(replace(_PLAIN, zero=(0,)), {"gradients": "own", "gradient_accumulation_fusion": False}),
    "intra_only": _alpa(pipeline=(1,)),
    "inter_only": _alpa(tensor=(1,), data=(1,)),
    "auto": _alpa(),
    "auto_sharding": _alpa(pipeline=(1,)),
    # Every operation divides the batch and nothing else, those of experts too.
    "data_parallel": _alpa(tensor=(1,), pipeline=(1,), expert=(1,), zero=(0,)),
    "zero_2": _alpa(tensor=(1,), pipeline=(1,), expert=(1,), zero=(2,)),
    "zero_3": _alpa(tensor=(1,), pipeline=(1,), expert=(1,), zero=(3,)),
    # Every weight and input divided along its largest dim among all devices, the rest by propagation: nearest to tensor
    # ranks, whose sequence is divided or not.
    "heuristic": _alpa(data=(1,), pipeline=(1,), sequence_parallel=(False, True)),
    # Its mixtures: ZeRO-2, experts divided among data ranks, no fused operations (deepspeed/benchmark_moe.py);
    # reductions under backward (ds_zero_stage_2_moe_config.json: overlap_comm), of every microbatch by itself
    # (DeepSpeed's engine: "ZeRO stage 2 communicates during non gradient accumulation boundaries as well").
    "deepspeed": Method(
        replace(_PLAIN, tensor=(1,), pipeline=(1,), zero=(2,)),
        {
            "gradients": "own",
            "gradient_accumulation_fusion": False,
            "eager": ("*",),
            "overlap": ("weight", "gradient"),
            "reducing": "microbatch",
        },
    ),
}
# Methods of one stage, which may divide weights among the devices of several nodes.
ACROSS_NODES = ("intra_only", "auto_sharding", "heuristic")


def method_name(parallel: Mapping[str, Any]) -> str:
    """The name of a row's method, without the system's before it; empty where it names none."""
    return str(parallel.get("method") or "").rpartition(".")[2].lower()


def known_of_method(parallel: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields of the layout that a row's method, or else its source, says of all that it allows."""
    method = METHODS.get(method_name(parallel))
    cuts = {"cuts": parallel["cuts"]} if parallel.get("cuts") else {}
    return {**(method.known if method else {}), **cuts}


def is_open(parallel: Mapping[str, Any]) -> bool:
    """Whether a row leaves open what has no default: degrees, the microbatch, or chunks that it says there were."""
    whole = parallel.get("microbatch") or parallel.get("per_device_batch") or parallel.get("local_batch")
    chunks = "interleaved" in str(parallel.get("schedule")) and not parallel.get("interleave")
    return not (parallel.get("t") and parallel.get("p") and whole) or chunks


def space_of(row: Mapping[str, Any], known: Mapping[str, Any]) -> Space:
    """The layouts that an open row allows; ``known``: the fields of its layout as they are read where it says them.
    Raises :class:`NotExpressible` for a method that is not known."""
    parallel, name = row["parallel"], method_name(row["parallel"])
    if name and name not in METHODS:
        raise NotExpressible(f"method {parallel['method']}: which layouts it allows is not known")
    devices = number(row["cluster"], "n_gpus")
    space = METHODS[name].space if name else OFFERED
    if name in ACROSS_NODES:
        space = _filled(space, tensor=tuple(d for d in range(1, devices + 1) if devices % d == 0))
    elif "interleaved" in str(parallel.get("schedule")):
        space = replace(space, interleave=(2, 3, 4, 6, 8))
    given = {name: _given(parallel, key, known) for key, name in NAMES.items() if parallel.get(key) is not None}
    found = replace(space, **{name: (value,) for name, value in {**solution(parallel), **given}.items()})
    if known.get("cuts") == "operations":  # Then stages may be smaller than layers.
        found = _filled(found, pipeline=tuple(divisors(devices)))
    if parallel.get("n_microbatches"):
        return replace(found, microbatches=(number(parallel, "n_microbatches"),))
    return _filled(found, microbatch=MICROBATCHES)


def _given(parallel: Mapping[str, Any], key: str, known: Mapping[str, Any]) -> Any:
    """What a row says of a field: as it is read where that takes more than a number."""
    return known[NAMES[key]] if NAMES[key] in known else number(parallel, key)


def _filled(space: Space, **values: Any) -> Space:
    """The space with these values where it has none."""
    return replace(space, **{name: value for name, value in values.items() if not getattr(space, name)})


def solution(parallel: Mapping[str, Any]) -> dict[str, int]:
    """Degrees that a row's ``solution`` names: how many stages, the mesh of each, and its logical mesh (data, tensor)
    or the degrees of both. Nothing of stages that differ, which no layout has. Raises :class:`NotExpressible` for
    degrees that are not those of the mesh.

    >>> solution({"solution": "2 stages (1,8) logical (2,4): dp2 x op4"})
    {'pipeline': 2, 'data': 2, 'tensor': 4}
    >>> solution({"solution": "2 stages of (1,2), dp2"})
    {'pipeline': 2, 'data': 2, 'tensor': 1}
    """
    text = str(parallel.get("solution") or "").lower()
    stages = re.search(r"(\d+) stages?", text)
    physical, _, logical = text.partition("logical")
    sizes = {math.prod(mesh) for mesh in _meshes(physical)}
    divided = set(_meshes(logical))
    if not stages or len(sizes) != 1 or len(divided) > 1:
        return {}
    found, size = {"pipeline": int(stages[1])}, sizes.pop()
    data, tensor = divided.pop() if divided else (_degree(text, "dp"), _degree(text, "op|mp|tp"))
    if data or tensor or size == 1:
        data = data or size // max(1, tensor)
        tensor = tensor or size // max(1, data)
        if data * tensor != size:
            raise NotExpressible(f"parallel.solution is {text!r}: dp{data} x op{tensor} are not the {size} of a stage")
        found |= {"data": data, "tensor": tensor}
    return found


def _meshes(text: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in re.findall(r"\((\d+),\s*(\d+)\)", text)]


def _degree(text: str, name: str) -> int:
    found = re.search(rf"\b(?:{name})(\d+)", text)
    return int(found[1]) if found else 0


def choose(
    model: LayoutModel, cluster: Cluster, devices: int, batch: int, like: Recipe, space: Space
) -> tuple[Priced, tuple[str, ...]]:
    """The best layout of the space, and the fields in which the layouts tried differ. Raises
    :class:`NotExpressible` if there are none, and :class:`autopar.errors.OptionsError` with what the first was refused
    for if none divides the model."""
    search = LayoutSearch(model, cluster, batch, like=like, space=space)
    tried = search.tried(devices)
    if not tried:
        layers, first = len(model.depth.priced_as), next(search.candidates(devices), None)
        if first is not None:
            model.price(first, cluster, batch)
        raise NotExpressible(
            f"no layout that the row allows divides {layers} layers and a batch of {batch} among {devices} devices"
        )
    names = [one.name for one in own_fields(like) if len({getattr(quick.layout, one.name) for quick in tried}) > 1]
    found = search.quickest(tried)
    leanest = min(tried, key=lambda one: one.peak - one.limit).layout
    return found[0] if found else model.price(leanest, cluster, batch), tuple(names)
