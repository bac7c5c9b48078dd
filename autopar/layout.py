"""A layout people choose by hand: degrees of parallelism, microbatches, schedule, recomputation, resting places."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal

from autopar.schedule.named import SCHEDULES

from .errors import OptionsError

Recompute = Literal["none", "selective", "elementwise", "operations", "full"]
Overlap = Literal["gradient", "weight", "message", "input_gradient", "tensor", "expert"]
_DEGREES = ("tensor", "pipeline", "data", "context", "expert", "microbatch", "interleave")
_COUNTS = ("lead", "tail", "moments", "offload_layers")
# The axes of the mesh on which one data rank's microbatch is placed.
CONTEXT, TENSOR = 0, 1
# Bytes of an element of a master weight, of an optimizer's moment, and of a gradient in fp32; of what such a weight has
# beyond one of 16 bits; of a moment in bf16.
MASTER_BYTES, REMAINDER_BYTES, SHORT_BYTES = 4, 2, 2
# What fields that name something may be.
CHOICES: Mapping[str, tuple[object, ...]] = {
    "recompute": ("none", "selective", "elementwise", "operations", "full"),
    "zero": (0, 1, 2, 3),
    "gradients": ("fp32", "own"),
    "reduction": ("scatter", "all", "all-fp32"),
    "precision": ("fp32", "bf16", "fp16", "fp8"),
    "dispatch": ("rows", "tokens"),
    "cuts": ("layers", "operations"),
    "gathers": ("layer", "tensor"),
    "operands": ("shards", "whole"),
    "allocation": ("caching", "expandable", "static"),
    "weights": ("own", "fp8"),
    "states": ("fp32", "bf16"),
    "masters": ("fp32", "remainder"),
    "reducing": ("step", "microbatch"),
}
_FLAGS = ("sequence_parallel", "adding", "scatter", "offload", "balanced")
_OVERLAPS = ("gradient", "weight", "message", "input_gradient", "tensor", "expert")


@dataclass(frozen=True)
class Layout:
    """How devices share a training step, in the terms of the field.

    Args:
        tensor, pipeline, data, context: devices among which weights, layers, the batch and the sequence are divided;
            their product is the number of devices, tensor innermost, pipeline outermost.
        expert: devices among which experts are divided, out of ``data`` x ``context``, neighbours first. Rows are sent
            to their experts and back by all-to-all; gradients of experts are reduced over the other data ranks.
        capacity: slots of an expert as a multiple of its equal share of the rows; all are sent and computed, filled or
            not. 1: exactly what is chosen is sent and computed, and experts are chosen equally often.
        microbatch: samples that one data rank computes at a time.
        interleave: chunks of layers on each pipeline stage.
        recompute: what backward computes again. ``"none"``; ``"selective"``: the insides of attention (everything
            between a product of two activations and the next); ``"elementwise"``: also what elementwise operations and
            normalisations make for products; ``"operations"``: all operations of layers except attention in one kernel
            and every other product with weights (torch's selective checkpoints); ``"full"``: whole layers from their
            inputs.
        sequence_parallel: whether values between tensor-parallel regions are divided along the sequence.
        zero: 1 shards the optimizer state over data ranks, 2 also gradients, 3 also weights.
        schedule: by name (:mod:`autopar.schedule.named`); default ``"1f1b"``, or ``"interleaved"`` with several chunks.
        precision: what is computed in. Reduced precisions keep fp32 master weights and accumulate gradients in fp32.
            ``"fp8"``: products with weights, everything else in bf16.
        overlap: what is sent while devices compute: ``"gradient"`` reductions under the last backward, ``"weight"``
            gathers under the layer before, ``"message"`` s between stages (otherwise both ends block),
            ``"input_gradient"`` collectives of the tensor ranks under the product that makes a weight's gradient,
            ``"tensor"`` (and context) collectives under the products next to them, ``"expert"`` exchanges of rows under
            the computing of another microbatch.
        eager: modules (globs of paths) whose elementwise operations run one by one, each reading and writing memory.
            Elsewhere a run of them is one kernel, and what backward can cheaply compute again is not kept.
        whole: modules (globs of paths) that run alike on every tensor rank, with their operands gathered first: a loss
            that sees all logits.
        gradients: the dtype gradients are accumulated in: ``"fp32"``, or ``"own"``, that of their weights.
        adding: whether gradients of microbatches are accumulated by operations of their own. Otherwise the products
            that make them do it, and the additional reads and writes are hidden under their computing.
        scatter: whether a value that is whole on every tensor rank is sent between stages in shards.
        offload: whether optimizer states rest in host memory.
        lead, tail: how many layers the embedding, and what comes after the layers, count as when these are cut into
            chunks. With 0 the ends carry them in addition to as many layers as the other chunks.
        reduction: what each rank gets of gradients whose states ZeRO divides: ``"scatter"``, its share; ``"all"``, all
            of them (not with ZeRO-3); ``"all-fp32"``, the same by messages in fp32 whatever dtype they are kept in.
        balanced: whether each context rank holds one piece from the sequence's beginning and one from its end, so that
            causal attention takes equally long on all. Otherwise the rank with the last tokens takes longest.
        gathers: what ZeRO-3 gathers at once: the weights of a ``"layer"``, once in forward and once in backward; or
            each ``"tensor"`` separately, and those that what backward computes again takes once more (DeepSpeed, 2021).
        operands: what sequence parallelism keeps of the operands of products: ``"shards"``, gathered once more in
            backward (Korthikanti et al. 2022, section 4.2.2), or the ``"whole"`` operand as gathered in forward.
        apart: modules (globs of paths) whose input gradients are each summed over tensor ranks separately. Elsewhere
            gradients of one value are added first, and their sum is all-reduced.
        holds: modules (globs of paths) whose operands their caller holds until backward has passed: a loss, where a
            pipeline holds its stages' outputs, or a training loop the logits. Elsewhere only what backward reads is.
        dispatch: what is sent to experts: ``"rows"``, every choice of a token; ``"tokens"``, a token once to each rank
            that has experts it chose, and between nodes once to each node (DeepEP, HybridEP).
        graphed: modules (globs of paths) whose operations the host starts as one (CUDA graphs), or never late. In all
            other modules each operation takes the device's ``host_seconds`` to start, and a layer computes no faster
            than it is started.
        cuts: where the model may be cut into chunks: between ``"layers"``, or between any ``"operations"``, so that
            chunks take equally long (exchanges of experts' rows and gathers of ZeRO-3 are not counted).
        moments: how many moments the optimizer keeps of each element: 2 for Adam, 1 for momentum, 0 for Adafactor,
            whose moments of rows and columns are few.
        allocation: a ``"caching"`` allocator loses some memory between blocks; with ``"expandable"`` segments it does
            not (torch's ``expandable_segments:True``, which maps pages where they are wanted), nor where a compiler
            lays out buffers beforehand (``"static"``).
        weights: what weights of products in fp8 rest in: ``"own"``, their dtype, with a copy in fp8 that all
            microbatches use; or ``"fp8"`` alone, in which ZeRO gathers them then (Megatron-Core's
            ``fp8_param_gather`` with a scale for each tensor or block; what it updates in MXFP8 it is known to gather
            in bf16, which cannot be said here and takes longer).
        states: the dtype of the optimizer's moments (``"bf16"``: Megatron-Core's precision-aware optimizer).
        masters: how master weights of reduced precisions rest: in ``"fp32"``, or as the ``"remainder"`` that weights in
            bf16 lack of it (TransformerEngine's ``store_param_remainders``).
        recomputed: modules (globs of paths) of which, and of all their parts, nothing is kept but what layers hand to
            each other: backward computes what it needs of them again, from what comes into them, besides what
            ``recompute`` says (Megatron-Core's ``recompute_modules``).
        offload_layers: of how many layers what is kept for backward rests in host memory meanwhile. It is sent under
            the computing of all layers, both ways; not with pipeline stages or GPipe (Megatron-Core's
            ``cpu_offloading_num_layers``).
        reducing: how often gradients are reduced over data ranks: once a ``"step"``, or of every ``"microbatch"`` by
            itself, as ZeRO-2 does that keeps no whole gradients (DeepSpeed's); ZeRO-3 always does.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    microbatch: int = 1
    interleave: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    zero: Literal[0, 1, 2, 3] = 0
    schedule: str | None = None
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "bf16"
    overlap: tuple[Overlap, ...] = ("gradient", "weight", "message", "input_gradient")
    eager: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    gradients: Literal["fp32", "own"] = "fp32"
    adding: bool = False
    scatter: bool = True
    offload: bool = False
    capacity: float = 1.0
    lead: int = 0
    tail: int = 0
    reduction: Literal["scatter", "all", "all-fp32"] = "scatter"
    balanced: bool = True
    gathers: Literal["layer", "tensor"] = "layer"
    operands: Literal["shards", "whole"] = "shards"
    apart: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    dispatch: Literal["rows", "tokens"] = "rows"
    graphed: tuple[str, ...] = ("*",)
    cuts: Literal["layers", "operations"] = "layers"
    moments: int = 2
    allocation: Literal["caching", "expandable", "static"] = "caching"
    reducing: Literal["step", "microbatch"] = "step"
    weights: Literal["own", "fp8"] = "own"
    states: Literal["fp32", "bf16"] = "fp32"
    masters: Literal["fp32", "remainder"] = "fp32"
    recomputed: tuple[str, ...] = ()
    offload_layers: int = 0

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_words()
        self._check_divided()
        self._check_schedule()

    def _check_numbers(self) -> None:
        for name in _DEGREES:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise OptionsError(f"Layout({name}={value!r}): not a positive whole number")
        for name in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                what = "moments" if name == "moments" else "layers"
                raise OptionsError(f"Layout({name}={value!r}): not a whole number of {what}")
        if type(self.capacity) not in (int, float) or not 0 < self.capacity < math.inf:
            raise OptionsError(f"Layout(capacity={self.capacity!r}): not a positive number")

    def _check_words(self) -> None:
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if type(value) is not type(known[0]) or value not in known:
                raise OptionsError(f"Layout({name}={value!r}): one of {', '.join(map(repr, known))}")
        for name in _FLAGS:
            if type(getattr(self, name)) is not bool:
                raise OptionsError(f"Layout({name}={getattr(self, name)!r}): neither True nor False")
        for name in ("overlap", "eager", "whole", "graphed", "apart", "holds", "recomputed"):
            words = getattr(self, name)
            if not (isinstance(words, tuple) and all(isinstance(word, str) for word in words)):
                raise OptionsError(f"Layout({name}={words!r}): not a tuple of words, such as ('weight',)")
        unknown = [one for one in self.overlap if one not in _OVERLAPS]
        if unknown:
            raise OptionsError(f"Layout(overlap=...): {unknown[0]!r} is none of {', '.join(_OVERLAPS)}")
        self._check_resting()

    def _check_resting(self) -> None:
        if self.recomputed and self.recompute in ("full", "operations"):
            raise OptionsError(
                f"Layout(recompute={self.recompute!r}, recomputed={self.recomputed!r}): layers are computed again "
                'anyway; leave recomputed out, or take recompute="none", "selective" or "elementwise"'
            )
        if self.weights == "fp8" and self.precision != "fp8":
            raise OptionsError(
                f'Layout(weights="fp8", precision={self.precision!r}): weights rest in fp8 where products take them '
                'so; take precision="fp8", or leave weights="own"'
            )
        if self.masters == "remainder" and (self.precision not in ("bf16", "fp8") or self.weights == "fp8"):
            other = 'weights="fp8"' if self.weights == "fp8" else f"precision={self.precision!r}"
            raise OptionsError(
                f'Layout(masters="remainder", {other}): a remainder is what weights in bf16 lack of fp32; take '
                'precision="bf16", or "fp8" with weights="own", or leave masters="fp32"'
            )

    def _check_divided(self) -> None:
        if self.zero == 3 and self.reduction != "scatter":
            raise OptionsError(
                f"Layout(zero=3, reduction={self.reduction!r}): a rank of ZeRO-3 holds only its share of weights and "
                'gradients, so each gets its share; leave reduction="scatter", or take zero=1 or 2'
            )
        if (self.data * self.context) % self.expert:
            raise OptionsError(
                f"Layout(expert={self.expert}): experts are divided among data x context ranks, and {self.expert} "
                f"does not divide {self.data} x {self.context}; "
                f"{degrees('expert', self.data * self.context, self.expert)}"
            )

    def _check_schedule(self) -> None:
        if self.offload_layers and (self.pipeline > 1 or self.schedule == "gpipe"):
            keep, instead = ("stages keep", "pipeline=1") if self.pipeline > 1 else ("GPipe keeps", "another schedule")
            raise OptionsError(
                f"Layout(offload_layers={self.offload_layers}, pipeline={self.pipeline}, "
                f"schedule={self.schedule!r}): what layers keep goes to the host and back within one microbatch, and "
                f"{keep} it of several; take offload_layers=0, or {instead}"
            )
        if self.schedule is not None and self.schedule not in SCHEDULES:
            raise OptionsError(f"Layout(schedule={self.schedule!r}): one of {', '.join(map(repr, SCHEDULES))}")
        if self.interleave > 1 and self.pipeline == 1:
            raise OptionsError(
                f"Layout(interleave={self.interleave}): chunks of layers take turns on pipeline stages, and pipeline=1 "
                "has none; take interleave=1, or pipeline=2 or more"
            )
        named = SCHEDULES[self.schedule_name]
        if self.pipeline == 1 and named.least > 1:
            raise OptionsError(
                f"Layout(schedule={self.schedule!r}): {named.least} chunks of layers take turns on each stage, and "
                "pipeline=1 has none; leave schedule out, or take pipeline=2 or more"
            )
        most = named.most or max(self.interleave, named.least)
        if self.pipeline > 1 and not named.least <= self.interleave <= most:
            works = min(max(self.interleave, named.least), most)
            raise OptionsError(
                f"Layout(schedule={self.schedule!r}, interleave={self.interleave}): {self.schedule_name!r} runs "
                f"{'at least ' * (named.most is None)}{named.least} chunk{'s' * (named.least > 1)} on each stage; "
                f"take interleave={works}"
            )

    @property
    def devices(self) -> int:
        return self.stage_devices * self.pipeline

    @property
    def stage_devices(self) -> int:
        """Devices of one pipeline stage."""
        return self.data * self.context * self.tensor

    @property
    def chunks(self) -> int:
        return self.pipeline * self.interleave

    @property
    def hides_input_gradients(self) -> bool:
        """Whether collectives of inputs' gradients are hidden each under its product, and not with all others."""
        return "input_gradient" in self.overlap and "tensor" not in self.overlap

    @property
    def schedule_name(self) -> str:
        return self.schedule or ("interleaved" if self.interleave > 1 else "1f1b")

    @property
    def state_itemsize(self) -> int:
        """Bytes of optimizer state of an element: its moments, and the master weight of reduced precisions."""
        moment = SHORT_BYTES if self.states == "bf16" else MASTER_BYTES
        master = REMAINDER_BYTES if self.masters == "remainder" else MASTER_BYTES
        return self.moments * moment + master * (self.precision != "fp32")

    def gradient_itemsize(self, itemsize: int) -> int:
        """Bytes of an element of the gradient of a weight of ``itemsize``, as it is added up."""
        return MASTER_BYTES if self.gradients == "fp32" else itemsize

    def microbatches(self, batch: int) -> int:
        """How many microbatches a data rank computes of a global ``batch``. Raises :class:`OptionsError` if they do
        not come out even."""
        if batch % (self.data * self.microbatch):
            sizes = [d for d in range(1, batch // self.data + 1) if batch % (self.data * d) == 0] or [batch]
            nearest = min(sizes, key=lambda size: abs(size - self.microbatch))
            raise OptionsError(
                f"a batch of {batch} does not divide into {self.data} data ranks x microbatches of "
                f"{self.microbatch}; a microbatch of {nearest} does"
                if batch % self.data == 0
                else f"a batch of {batch} does not divide among {self.data} data ranks; "
                f"{math.ceil(batch / self.data) * self.data} does"
            )
        return batch // (self.data * self.microbatch)

    @staticmethod
    def parse(text: str) -> Layout:
        """The layout that ``str`` writes so; words may be separated by commas. Several values of one key are joined by
        plus signs. Raises :class:`OptionsError`.

        >>> Layout.parse("tensor=8 pipeline=4 recompute=full overlap=gradient+message").devices
        32
        """
        kinds = {field.name: field for field in fields(Layout)}
        found: dict[str, Any] = {}
        for word in text.replace(",", " ").split():
            name, equals, value = word.partition("=")
            if not equals or name not in kinds:
                raise OptionsError(f"{word!r} in a layout: write NAME=VALUE, NAME one of {', '.join(kinds)}")
            found[name] = _read(name, value, kinds[name].default)
        return Layout(**found)

    def __str__(self) -> str:
        """What differs from one device: ``tensor=8 pipeline=8 microbatch=1``."""
        said = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        found = [
            f"{name}={_written(value)}" for name, value, default in said if value != default or name == "microbatch"
        ]
        return " ".join(found)


def matches(module: str, patterns: Iterable[str]) -> bool:
    """Whether a module's path is one of those that a field of a layout names by globs."""
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def matches_whole(module: str, patterns: tuple[str, ...]) -> bool:
    """Whether a module, or one that it is part of, is one of those that a field of a layout names by globs.

    >>> matches_whole("layers.0.mlp.up", ("*.mlp",)), matches_whole("layers.0.mlp_norm", ("*.mlp",))
    (True, False)
    """
    ends = [end for end, letter in enumerate(module) if letter == "."]
    return any(matches(module[:end], patterns) for end in (0, *ends, len(module)))


def degrees(name: str, size: int, asked: int) -> str:
    """What to take instead of ``asked`` ranks, among which ``size`` does not divide: the nearest numbers that do.

    >>> degrees("tensor", 8, 5)
    'tensor=4 and tensor=8 do'
    >>> degrees("tensor", 8, 16)
    'tensor=8 does'
    """
    every = [n for n in range(1, size + 1) if size % n == 0]
    below, above = [n for n in every if n < asked][-1:], [n for n in every if n > asked][:1]
    found = [f"{name}={n}" for n in (*below, *above)]
    return f"{' and '.join(found)} do{'es' * (len(found) == 1)}"


def _written(value: object) -> str:
    return "+".join(value) if isinstance(value, tuple) else str(value)


def _read(name: str, text: str, default: object) -> object:
    """A value of the kind of ``default``."""
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, (int, float)):
            return type(default)(text)
    except (KeyError, ValueError) as error:
        what = "true or false" if isinstance(default, bool) else "a number"
        raise OptionsError(f"{name}={text} in a layout: not {what}") from error
    return tuple(part for part in text.split("+") if part) if isinstance(default, tuple) else text
