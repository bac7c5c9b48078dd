"""Layouts that people choose by hand: degrees of parallelism, microbatches, schedule, recomputation, storage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from autopar.schedule.named import SCHEDULES

from .errors import OptionsError
from .field_text import read, written
from .given_fields import own_fields, remembers_given
from .keywords import suggests_fields
from .renamed_fields import LAYOUT_FIELDS, accepts_old_names

Recompute = Literal["none", "selective", "elementwise", "operations", "full"]
Overlap = Literal["gradient", "weight", "message", "input_gradient", "tensor", "expert"]
_DEGREES = ("tensor", "pipeline", "data", "context", "expert", "microbatch", "interleave")
_COUNTS = ("embedding_as_layers", "head_as_layers", "moments", "offload_layers")
# The axes of the mesh on which one data rank's microbatch is placed.
CONTEXT, TENSOR = 0, 1
# Bytes of an element: of a master weight, an optimizer's moment or a gradient in fp32; of what a master weight has
# beyond a weight of 16 bits; of a moment in bf16. By definition of the formats.
MASTER_BYTES, REMAINDER_BYTES, SHORT_BYTES = 4, 2, 2
# The values of fields that take one of a few.
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
_FLAGS = ("sequence_parallel", "gradient_accumulation_fusion", "scatter", "offload", "context_load_balancing")
# Fields that name modules by globs of their paths.
PATTERNS = ("eager", "replicated", "separate_dgrad_reductions", "cuda_graphs", "retained_inputs", "recomputed")
_OVERLAPS = ("gradient", "weight", "message", "input_gradient", "tensor", "expert")


@accepts_old_names(LAYOUT_FIELDS)
@suggests_fields
@remembers_given
@dataclass(frozen=True)
class Layout:
    """How devices share a training step, in the terms of the field.

    Args:
        tensor, pipeline, data, context: devices among which weights, layers, the batch and the sequence are divided;
            their product is the number of devices, tensor innermost, pipeline outermost.
        expert: devices among which experts are divided, out of ``data`` x ``context``, neighbours first. Rows are sent
            to their experts and back by all-to-all; gradients of experts are reduced over the other data ranks.
        capacity: slots of an expert as a multiple of its equal share of the rows; all are sent and computed, filled or
            not. 1: exactly the chosen rows are sent and computed, and experts are chosen equally often.
        microbatch: samples that one data rank computes at a time.
        interleave: chunks of layers on each pipeline stage.
        recompute: what backward recomputes. ``"none"``; ``"selective"``: the insides of attention (everything between a
            product of two activations and the next); ``"elementwise"``: also the operands of products that elementwise
            operations and normalisations compute; ``"operations"``: all operations of layers except attention in one
            kernel and every other product with weights (torch's selective checkpoints); ``"full"``: whole layers from
            their inputs.
        sequence_parallel: whether values between tensor-parallel regions are divided along the sequence.
        zero: 1 shards the optimizer state over data ranks, 2 also gradients, 3 also weights.
        schedule: by name (:mod:`autopar.schedule.named`); default ``"1f1b"``, or ``"interleaved"`` with several chunks.
        precision: the dtype of computation. Reduced precisions keep fp32 master weights and accumulate gradients in
            fp32. ``"fp8"``: products with weights; everything else is in bf16.
        overlap: what is sent while devices compute: ``"gradient"`` reductions under the last backward, ``"weight"``
            gathers under the layer before, ``"message"`` s between stages (otherwise both ends block),
            ``"input_gradient"`` collectives of the tensor ranks under the product that computes a weight's gradient,
            ``"tensor"`` (and context) collectives under the products next to them, ``"expert"`` exchanges of rows under
            the computation of another microbatch.
        eager: modules (globs of paths) whose elementwise operations run one by one, each reading and writing memory.
            Elsewhere a run of them is one kernel, and values that backward can cheaply recompute are not retained.
        replicated: modules (globs of paths) that every tensor rank computes in full, on operands gathered first: a loss
            that reads all logits.
        gradients: the dtype gradients are accumulated in: ``"fp32"``, or ``"own"``, that of their weights.
        gradient_accumulation_fusion: whether the products that compute weights' gradients also accumulate them over
            microbatches (Megatron's option of this name); the additional reads and writes are hidden under their
            computation. Otherwise separate operations add the gradients up.
        scatter: whether a value that every tensor rank has in full is sent between stages in shards.
        offload: whether optimizer states rest in host memory.
        embedding_as_layers, head_as_layers: how many layers the embedding, and everything after the layers, count as
            when the model is cut into chunks (Megatron's ``account_for_embedding_in_pipeline_split`` and
            ``account_for_loss_in_pipeline_split`` count each as one). With 0 the first and the last chunk have them in
            addition to as many layers as the other chunks.
        reduction: what each rank gets of gradients whose states ZeRO divides: ``"scatter"``, its share; ``"all"``, all
            of them (not with ZeRO-3); ``"all-fp32"``, all of them, sent in fp32 whatever dtype they are stored in.
        context_load_balancing: whether each context rank has one piece from the sequence's beginning and one from its
            end, so that causal attention takes equally long on all. Otherwise the rank with the last tokens takes
            longest.
        gathers: what ZeRO-3 gathers at once: the weights of a ``"layer"``, once in forward and once in backward; or
            each ``"tensor"`` separately, and once more if recomputation reads it (DeepSpeed, 2021).
        operands: what sequence parallelism retains of the operands of products: ``"shards"``, gathered once more in
            backward (Korthikanti et al. 2022, section 4.2.2), or the ``"whole"`` operand as gathered in forward.
        separate_dgrad_reductions: modules (globs of paths) whose input gradients (dgrads) are each reduced over tensor
            ranks separately. Elsewhere gradients of one value are added first, and their sum is all-reduced.
        retained_inputs: modules (globs of paths) whose inputs the caller retains until backward has passed: a loss,
            where a pipeline retains its stages' outputs, or a training loop the logits. Elsewhere only what backward
            reads is retained.
        dispatch: what is sent to experts: ``"rows"``, every choice of a token; ``"tokens"``, a token once to each rank
            that has experts it chose, and between nodes once to each node (DeepEP, HybridEP).
        cuda_graphs: modules (globs of paths) that are never bound by kernel launches, because the host launches their
            kernels as one (CUDA graphs). In all other modules each kernel takes the device's ``host_seconds`` to
            launch, and a layer takes as long as the slower of host and device. Default: all modules.
        cuts: where the model may be cut into chunks: between ``"layers"``, or between any ``"operations"``, so that
            chunks take equally long (exchanges of experts' rows and gathers of ZeRO-3 are not counted).
        moments: how many moments the optimizer keeps of each element: 2 for Adam, 1 for momentum, 0 for Adafactor,
            which keeps moments of rows and columns only.
        allocation: a ``"caching"`` allocator loses some memory between blocks. ``"expandable"`` segments lose none
            (torch's ``expandable_segments:True``, which maps pages where they are needed), nor does a compiler that
            lays out buffers in advance (``"static"``).
        weights: how weights of products in fp8 are stored: ``"own"``, in their dtype, with a copy in fp8 that all
            microbatches use; or in ``"fp8"`` alone, which ZeRO then gathers (Megatron-Core's ``fp8_param_gather`` with
            a scale for each tensor or block; with MXFP8 it is known to gather bf16, which no layout expresses and
            which takes longer).
        states: the dtype of the optimizer's moments (``"bf16"``: Megatron-Core's precision-aware optimizer).
        masters: how master weights of reduced precisions are stored: in ``"fp32"``, or as the ``"remainder"`` that
            weights in bf16 lack of it (TransformerEngine's ``store_param_remainders``).
        recomputed: modules (globs of paths) that backward recomputes from their inputs, with all their parts, in
            addition to what ``recompute`` says (Megatron-Core's ``recompute_modules``). Only what layers hand to each
            other is retained.
        offload_layers: of how many layers the saved activations rest in host memory until backward. They are sent
            under the computation of all layers, both ways; not with pipeline stages or GPipe (Megatron-Core's
            ``cpu_offloading_num_layers``).
        reducing: how often gradients are reduced over data ranks: once a ``"step"``, or for every ``"microbatch"``, as
            ZeRO-2 does where it stores no whole gradients (DeepSpeed's); ZeRO-3 always does.
        given: the fields that were given, in order; set by itself. :class:`Options` restrict a plan by these alone.
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
    replicated: tuple[str, ...] = ()
    gradients: Literal["fp32", "own"] = "fp32"
    gradient_accumulation_fusion: bool = True
    scatter: bool = True
    offload: bool = False
    capacity: float = 1.0
    embedding_as_layers: int = 0
    head_as_layers: int = 0
    reduction: Literal["scatter", "all", "all-fp32"] = "scatter"
    context_load_balancing: bool = True
    gathers: Literal["layer", "tensor"] = "layer"
    operands: Literal["shards", "whole"] = "shards"
    separate_dgrad_reductions: tuple[str, ...] = ()
    retained_inputs: tuple[str, ...] = ()
    dispatch: Literal["rows", "tokens"] = "rows"
    cuda_graphs: tuple[str, ...] = ("*",)
    cuts: Literal["layers", "operations"] = "layers"
    moments: int = 2
    allocation: Literal["caching", "expandable", "static"] = "caching"
    reducing: Literal["step", "microbatch"] = "step"
    weights: Literal["own", "fp8"] = "own"
    states: Literal["fp32", "bf16"] = "fp32"
    masters: Literal["fp32", "remainder"] = "fp32"
    recomputed: tuple[str, ...] = ()
    offload_layers: int = 0
    given: tuple[str, ...] = field(default=(), compare=False, kw_only=True)

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
                unit = "moments" if name == "moments" else "layers"
                raise OptionsError(f"Layout({name}={value!r}): not a whole number of {unit}")
        if type(self.capacity) not in (int, float) or not 0 < self.capacity < math.inf:
            raise OptionsError(f"Layout(capacity={self.capacity!r}): not a positive number")

    def _check_words(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if type(value) is not type(choices[0]) or value not in choices:
                raise OptionsError(f"Layout({name}={value!r}): must be one of {', '.join(map(repr, choices))}")
        for name in _FLAGS:
            if type(getattr(self, name)) is not bool:
                raise OptionsError(f"Layout({name}={getattr(self, name)!r}): neither True nor False")
        for name in ("overlap", *PATTERNS):
            words = getattr(self, name)
            if not (isinstance(words, tuple) and all(isinstance(word, str) for word in words)):
                raise OptionsError(f"Layout({name}={words!r}): not a tuple of words, such as ('weight',)")
        unknown = [word for word in self.overlap if word not in _OVERLAPS]
        if unknown:
            raise OptionsError(f"Layout(overlap=...): {unknown[0]!r} is not one of {', '.join(_OVERLAPS)}")
        self._check_resting()

    def _check_resting(self) -> None:
        if self.recomputed and self.recompute in ("full", "operations"):
            raise OptionsError(
                f"Layout(recompute={self.recompute!r}, recomputed={self.recomputed!r}): layers are recomputed "
                'anyway; leave recomputed out, or take recompute="none", "selective" or "elementwise"'
            )
        if self.weights == "fp8" and self.precision != "fp8":
            raise OptionsError(
                f'Layout(weights="fp8", precision={self.precision!r}): weights rest in fp8 only where products read '
                'fp8; take precision="fp8", or leave weights="own"'
            )
        if self.masters == "remainder" and (self.precision not in ("bf16", "fp8") or self.weights == "fp8"):
            obstacle = 'weights="fp8"' if self.weights == "fp8" else f"precision={self.precision!r}"
            raise OptionsError(
                f'Layout(masters="remainder", {obstacle}): a remainder is what weights in bf16 lack of fp32; take '
                'precision="bf16", or "fp8" with weights="own", or leave masters="fp32"'
            )

    def _check_divided(self) -> None:
        if self.zero == 3 and self.reduction != "scatter":
            raise OptionsError(
                f"Layout(zero=3, reduction={self.reduction!r}): a rank of ZeRO-3 stores only its share of weights and "
                'gradients, so each gets its share; leave reduction="scatter", or take zero=1 or 2'
            )
        is_known = "data" in self.given and "context" in self.given
        if is_known and (self.data * self.context) % self.expert:
            raise OptionsError(
                f"Layout(expert={self.expert}): experts are divided among data x context ranks, and {self.expert} "
                f"does not divide {self.data} x {self.context}; "
                f"{degrees('expert', self.data * self.context, self.expert)}"
            )

    def _check_schedule(self) -> None:
        if self.offload_layers and (self.pipeline > 1 or self.schedule == "gpipe"):
            retains, instead = (
                ("stages retain", "pipeline=1") if self.pipeline > 1 else ("GPipe retains", "another schedule")
            )
            raise OptionsError(
                f"Layout(offload_layers={self.offload_layers}, pipeline={self.pipeline}, "
                f"schedule={self.schedule!r}): saved activations go to the host and back within one microbatch, "
                f"and {retains} those of several; take offload_layers=0, or {instead}"
            )
        if self.schedule is not None and self.schedule not in SCHEDULES:
            raise OptionsError(f"Layout(schedule={self.schedule!r}): must be one of {', '.join(map(repr, SCHEDULES))}")
        if "pipeline" not in self.given:
            return
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

    def completed(self) -> Layout:
        """This layout with every field given. Raises :class:`OptionsError` if the fields contradict each other."""
        return replace(self, given=tuple(one.name for one in own_fields(self)))

    @property
    def restriction(self) -> str:
        """The given fields, as :meth:`parse` reads them: ``tensor=2 data=1``."""
        values = ((name, getattr(self, name)) for name in self.given)
        return " ".join(f"{name}={written(value)}" for name, value in values if value is not None)

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
        """Whether each collective of an input's gradient is hidden under its own product, and not with all others."""
        return "input_gradient" in self.overlap and "tensor" not in self.overlap

    @property
    def schedule_name(self) -> str:
        return self.schedule or ("interleaved" if self.interleave > 1 else "1f1b")

    @property
    def state_itemsize(self) -> int:
        """Bytes of optimizer state per element: its moments, and the master weight of reduced precisions."""
        master = REMAINDER_BYTES if self.masters == "remainder" else MASTER_BYTES
        return self.moment_itemsize + master * (self.precision != "fp32")

    @property
    def moment_itemsize(self) -> int:
        """Bytes of an element's moments."""
        return self.moments * (SHORT_BYTES if self.states == "bf16" else MASTER_BYTES)

    def gradient_itemsize(self, itemsize: int) -> int:
        """Bytes of an element of the gradient of a weight of ``itemsize``, as it is accumulated."""
        return MASTER_BYTES if self.gradients == "fp32" else itemsize

    def microbatches(self, batch: int) -> int:
        """How many microbatches a data rank computes of a global ``batch``. Raises :class:`OptionsError` if the batch
        does not divide evenly."""
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
        """The layout that ``str`` writes as ``text``; words may be separated by commas. Several values of one key are
        joined by plus signs. Old names of fields are read too, with a warning. Raises :class:`OptionsError`.

        >>> Layout.parse("tensor=8 pipeline=4 recompute=full overlap=gradient+message").devices
        32
        """
        defaults = {one.name: one.default for one in own_fields(Layout)}
        values: dict[str, Any] = {}
        for word in text.replace(",", " ").split():
            name, equals, value = word.partition("=")
            current = LAYOUT_FIELDS[name].new if name in LAYOUT_FIELDS else name
            if name in values:
                raise OptionsError(f"{word!r} in a layout: {name} is given twice")
            if not equals or current not in defaults:
                raise OptionsError(f"{word!r} in a layout: write NAME=VALUE, NAME one of {', '.join(defaults)}")
            values[name] = read(name, value, defaults[current])
        return Layout(**values)

    def __str__(self) -> str:
        """What differs from one device: ``tensor=8 pipeline=8 microbatch=1``."""
        values = ((one.name, getattr(self, one.name), one.default) for one in own_fields(self))
        return " ".join(
            f"{name}={written(value)}" for name, value, default in values if value != default or name == "microbatch"
        )


def matches(module: str, patterns: Iterable[str]) -> bool:
    """Whether a module's path matches one of the globs of a layout's field."""
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def matches_whole(module: str, patterns: tuple[str, ...]) -> bool:
    """Whether the path of a module, or of one that contains it, matches one of the globs of a layout's field.

    >>> matches_whole("layers.0.mlp.up", ("*.mlp",)), matches_whole("layers.0.mlp_norm", ("*.mlp",))
    (True, False)
    """
    ends = [end for end, letter in enumerate(module) if letter == "."]
    return any(matches(module[:end], patterns) for end in (0, *ends, len(module)))


def degrees(name: str, size: int, requested: int) -> str:
    """What to take instead of ``requested`` ranks, among which ``size`` does not divide: the nearest divisors.

    >>> degrees("tensor", 8, 5)
    'tensor=4 and tensor=8 do'
    >>> degrees("tensor", 8, 16)
    'tensor=8 does'
    """
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    below, above = [n for n in divisors if n < requested][-1:], [n for n in divisors if n > requested][:1]
    degrees_that_divide = [f"{name}={n}" for n in (*below, *above)]
    return f"{' and '.join(degrees_that_divide)} do{'es' * (len(degrees_that_divide) == 1)}"
