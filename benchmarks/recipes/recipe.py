"""Recipes: layouts with what other systems do in a training step, and the runtime does not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from autopar.errors import OptionsError
from autopar.given_fields import own_fields, remembers_given
from autopar.keywords import suggests_fields
from autopar.layout import MASTER_BYTES, Layout
from benchmarks.emulator.stored import MOMENTS, gradient_itemsize, moment_itemsize, repeats_layers, state_itemsize

Overlap = Literal["gradient", "weight", "message", "input_gradient", "tensor", "expert"]
OVERLAPS = ("gradient", "weight", "message", "input_gradient", "tensor", "expert")
# Fields that name modules by globs of their paths.
PATTERNS = ("eager", "replicated", "separate_dgrad_reductions", "cuda_graphs", "retained_inputs", "recomputed")
_COUNTS = {
    **dict.fromkeys(("embedding_as_layers", "head_as_layers", "offload_layers"), "layers"),
    **dict.fromkeys(("expert_groups", "chosen_groups"), "groups"),
    "moments": "moments",
}
# Bytes of an element: of what a master weight has beyond a weight of 16 bits; of a moment in bf16.
# By definition of the formats.
REMAINDER_BYTES, SHORT_BYTES = 2, 2


@suggests_fields
@remembers_given
@dataclass(frozen=True)
class Recipe(Layout):
    """A layout as another system runs it. With the defaults it is priced as the layout that it extends.

    Args:
        recompute: also ``"elementwise"``: the insides of attention, and the operands of products that elementwise
            operations and normalisations compute; and ``"operations"``: all operations of layers except attention in
            one kernel and every other product with weights (torch's selective checkpoints).
        precision: also ``"fp8"``: products with weights; everything else is in bf16.
        overlap: what is sent while devices compute: ``"gradient"`` reductions under the last backward, ``"weight"``
            gathers under the layer before, ``"message"`` s between stages (otherwise both ends block),
            ``"input_gradient"`` collectives of the tensor ranks under the product that computes a weight's gradient,
            ``"tensor"`` (and context) collectives under the products next to them, ``"expert"`` exchanges of rows under
            the computation of another microbatch, which those of the first and the last do not have.
        eager: modules (globs of paths) whose elementwise operations run one by one, each reading and writing memory.
            Elsewhere a run of them is one kernel, and values that backward can cheaply recompute are not retained.
        replicated: modules (globs of paths) that every tensor rank computes in full, on operands gathered first: a loss
            that reads all logits.
        gradients: the dtype gradients are accumulated in: ``"fp32"``, or ``"own"``, that of their weights.
        gradient_accumulation_fusion: whether the products that compute weights' gradients also accumulate them over
            microbatches (Megatron's option of this name); the additional reads and writes are hidden under their
            computation. Otherwise separate operations add the gradients up.
        scatter: whether a value that every tensor rank has in full is sent between stages in shards.
        capacity: slots of an expert as a multiple of its equal share of the rows; all are sent and computed, filled or
            not. 1: exactly the chosen rows are sent and computed, and experts are chosen equally often.
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
        reducing: how often gradients are reduced over data ranks: once a ``"step"``, or for every ``"microbatch"``, as
            ZeRO-2 does where it stores no whole gradients (DeepSpeed's); ZeRO-3 always does.
        weights: how weights of products in fp8 are stored: ``"own"``, in their dtype, with a copy in fp8 that all
            microbatches use; or in ``"fp8"`` alone, which ZeRO then gathers (Megatron-Core's ``fp8_param_gather`` with
            a scale for each tensor or block; with MXFP8 it is known to gather bf16, which no recipe expresses and
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
        attention: rates of fused attention, relative to the device's without a mask, where another system's kernel has
            others: ``"plain:FORWARD:BACKWARD"`` or ``"masked:FORWARD:BACKWARD"``.
        activation_gradient: how many times as long the kernel takes that multiplies for the gradient of experts'
            activation and computes that.
        fp8_head: whether the head, too, is multiplied in fp8 (Megatron-Core's ``fp8_output_proj``).
        expert_groups, chosen_groups: in how many groups routers have experts, and how many of these a token's experts
            are of (DeepSeek-V3's device-limited routing): with ``dispatch="tokens"`` it is sent to fewer ranks and
            nodes. 0: any experts.
    """

    recompute: Literal["none", "selective", "elementwise", "operations", "full"] = "none"  # type: ignore[assignment]
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "bf16"  # type: ignore[assignment]
    overlap: tuple[Overlap, ...] = ("gradient", "weight", "message", "input_gradient")
    eager: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    gradients: Literal["fp32", "own"] = "fp32"
    gradient_accumulation_fusion: bool = True
    scatter: bool = True
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
    moments: int = MOMENTS
    allocation: Literal["caching", "expandable", "static"] = "caching"
    reducing: Literal["step", "microbatch"] = "step"
    weights: Literal["own", "fp8"] = "own"
    states: Literal["fp32", "bf16"] = "fp32"
    masters: Literal["fp32", "remainder"] = "fp32"
    recomputed: tuple[str, ...] = ()
    offload_layers: int = 0
    attention: tuple[str, ...] = ()
    activation_gradient: float = 1.0
    fp8_head: bool = False
    expert_groups: int = 0
    chosen_groups: int = 0

    choices: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **Layout.choices,
        "recompute": ("none", "selective", "elementwise", "operations", "full"),
        "precision": ("fp32", "bf16", "fp16", "fp8"),
        "gradients": ("fp32", "own"),
        "reduction": ("scatter", "all", "all-fp32"),
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
    flags: ClassVar[tuple[str, ...]] = (
        *(*Layout.flags, "gradient_accumulation_fusion", "scatter", "context_load_balancing", "fp8_head"),
    )

    @staticmethod
    def like(layout: Layout, **values: Any) -> Recipe:
        """A layout with what another system does of it."""
        given = {field.name: getattr(layout, field.name) for field in own_fields(layout)}
        return Recipe(**{**given, **values})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, unit in _COUNTS.items():
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise OptionsError(f"Recipe({name}={value!r}): not a whole number of {unit}")
        for name in ("capacity", "activation_gradient"):
            if not _is_positive(getattr(self, name)):
                raise OptionsError(f"Recipe({name}={getattr(self, name)!r}): not a positive number")
        for name in ("overlap", "attention", *PATTERNS):
            words = getattr(self, name)
            if not (isinstance(words, tuple) and all(isinstance(word, str) for word in words)):
                raise OptionsError(f"Recipe({name}={words!r}): not a tuple of words, such as ('weight',)")
        unknown = [word for word in self.overlap if word not in OVERLAPS]
        if unknown:
            raise OptionsError(f"Recipe(overlap=...): {unknown[0]!r} is not one of {', '.join(OVERLAPS)}")
        for word in self.attention:
            _rates(word)
        self._check_resting()
        self._check_offloaded()
        if not min(1, self.expert_groups) <= self.chosen_groups <= self.expert_groups:
            raise OptionsError(
                f"Recipe(expert_groups={self.expert_groups}, chosen_groups={self.chosen_groups}): tokens choose from 1 "
                "to all of the groups; leave both 0 if experts are in none"
            )

    def _check_resting(self) -> None:
        if self.recomputed and self.repeats_layers:
            raise OptionsError(
                f"Recipe(recompute={self.recompute!r}, recomputed={self.recomputed!r}): layers are recomputed "
                'anyway; leave recomputed out, or take recompute="none", "selective" or "elementwise"'
            )
        if self.weights == "fp8" and self.precision != "fp8":
            raise OptionsError(
                f'Recipe(weights="fp8", precision={self.precision!r}): weights rest in fp8 only where products read '
                'fp8; take precision="fp8", or leave weights="own"'
            )
        if self.masters == "remainder" and (self.precision not in ("bf16", "fp8") or self.weights == "fp8"):
            obstacle = 'weights="fp8"' if self.weights == "fp8" else f"precision={self.precision!r}"
            raise OptionsError(
                f'Recipe(masters="remainder", {obstacle}): a remainder is what weights in bf16 lack of fp32; take '
                'precision="bf16", or "fp8" with weights="own", or leave masters="fp32"'
            )
        if self.zero == 3 and self.reduction != "scatter":
            raise OptionsError(
                f"Recipe(zero=3, reduction={self.reduction!r}): a rank of ZeRO-3 stores only its share of weights and "
                'gradients, so each gets its share; leave reduction="scatter", or take zero=1 or 2'
            )

    def _check_offloaded(self) -> None:
        if self.offload_layers and (self.pipeline > 1 or self.schedule == "gpipe"):
            retains, instead = (
                ("stages retain", "pipeline=1") if self.pipeline > 1 else ("GPipe retains", "another schedule")
            )
            raise OptionsError(
                f"Recipe(offload_layers={self.offload_layers}, pipeline={self.pipeline}, "
                f"schedule={self.schedule!r}): saved activations go to the host and back within one microbatch, "
                f"and {retains} those of several; take offload_layers=0, or {instead}"
            )

    def attention_rates(self, is_masked: bool) -> tuple[float, float] | None:
        """The rates of ``attention`` forward and backward, if it has any of a kind."""
        kind = "masked" if is_masked else "plain"
        return next((rates for name, rates in map(_rates, self.attention) if name == kind), None)

    @property
    def repeats_layers(self) -> bool:
        return self.recompute in ("full", "operations")

    @property
    def hides_input_gradients(self) -> bool:
        """Whether each collective of an input's gradient is hidden under its own product, and not with all others."""
        return "input_gradient" in self.overlap and "tensor" not in self.overlap

    @property
    def state_itemsize(self) -> int:
        master = REMAINDER_BYTES if self.masters == "remainder" else MASTER_BYTES
        return self.moment_itemsize + master * (self.precision != "fp32")

    @property
    def moment_itemsize(self) -> int:
        return self.moments * (SHORT_BYTES if self.states == "bf16" else MASTER_BYTES)

    def gradient_itemsize(self, itemsize: int) -> int:
        return MASTER_BYTES if self.gradients == "fp32" else itemsize


repeats_layers.register(Recipe, lambda layout: layout.repeats_layers)
moment_itemsize.register(Recipe, lambda layout: layout.moment_itemsize)
state_itemsize.register(Recipe, lambda layout: layout.state_itemsize)
gradient_itemsize.register(Recipe, lambda layout, itemsize: layout.gradient_itemsize(itemsize))


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]


def _rates(word: str) -> tuple[str, tuple[float, float]]:
    """The kind of attention, and its rates forward and backward. Raises :class:`OptionsError`."""
    try:
        kind, forward, backward = word.split(":")
        rates = float(forward), float(backward)
    except ValueError:
        kind, rates = "", (0.0, 0.0)
    if kind not in ("plain", "masked") or not all(map(_is_positive, rates)):
        raise OptionsError(
            f"Recipe(attention=...): {word!r} has no rates of plain or masked attention; write them as "
            "'masked:0.3:0.4', forward and backward"
        )
    return kind, rates
