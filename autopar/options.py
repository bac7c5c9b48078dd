"""The options of a plan that a user may fix; those left at None are searched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from autopar.schedule.named import SCHEDULES

from .byte_sizes import bytes_of
from .errors import OptionsError, PlanMismatchError
from .given_fields import remembers_given
from .keywords import suggests_fields
from .layout import Layout
from .offload import asked
from .optimizers import OPTIMIZERS
from .precision import PRECISIONS, Precision
from .restriction import SHARED, check_layout, shared_options
from .sync import EVERY_STEP, Sync, check_sync

# A schedule that a solver builds for the model.
SOLVED = "solved"
# What the solvers of one plan may take where no time limit is given, in seconds of counted work.
# Chosen: a minute of planning is little against a training.
COUNTED_SECONDS = 60.0
# The values of options that take one of a few, in addition to None.
CHOICES: Mapping[str, tuple[object, ...]] = {
    "schedule": (*SCHEDULES, SOLVED),
    "recompute": ("none", "selective", "full"),
    "precision": PRECISIONS,
    "zero": (0, 1, 2, 3),
    "check_inputs": ("first", "always", "never"),
    "last_batch": ("replicate", "pad", "error"),
    "nonfinite": ("raise", "skip"),
    "mode": ("training", "inference"),
    "objective": ("latency", "throughput"),
    "batch_statistics": ("batch", "microbatch"),
}


@suggests_fields
@remembers_given
@dataclass(frozen=True)
class Options:
    """Options of :func:`autopar.plan`, :func:`autopar.parallelize` and :func:`autopar.verify`.

    Args:
        memory_limit: bytes per device that a plan may use, as a number or as text with a unit: ``"40GiB"`` (2**30
            bytes each), ``"80GB"`` (10**9); default: the device's memory less the allocator's reserve.
        zero: the ZeRO stage. 0 keeps weights, gradients and optimizer state where computation needs them; 1 shards the
            optimizer state over every axis; 2 also gradients; 3 also weights (fully sharded).
        optimizer: the kind of optimizer, which decides the bytes of its state: ``"adamw"``, ``"sgd"``,
            ``"momentum"``, ...
        pins: placements by module path or parameter name, globs allowed: ``{"lm_head.weight": "S(0),R"}``. The path
            of a parameter fixes how it is stored, that of a module fixes its output. ``"stage 1"`` for a module path
            fixes its pipeline stage.
        mesh_search: whether the planner may split and regroup the axes of the mesh; only a mesh without axis names,
            of all ranks and in their order, is regrouped.
        time_limit: seconds of computation that the solvers of one plan may take together. None: steps of known cost
            are counted instead, up to about 60 seconds of one core, so that every run on every machine makes the same
            plan. A number: processor time of this process, so that other load of the machine hardly matters; but where
            the limit stops a solver, runs may differ. It is approximate: a solver that other work delays may compute
            for up to three times its share. Each placement program (one for each mesh shape and pipeline tried, and
            the baselines) may take half of what is left; an exact solution is not begun if its relaxation alone would
            take longer, by a speed measured on one machine. The limit does not count the other work of planning
            (tracing, rules, prices), nor what has limits of its own: a solved schedule (up to about 5 seconds), the
            search for the plan of least memory where a limit is too small, and the search for the limit that an error
            names where stages fit nowhere (about as many seconds again).
        gap: relative distance from the proven bound at which a solver may stop.
        stages: the number of pipeline stages, which take the outermost devices of the mesh; 1 for none. A tuple gives
            the number of devices of each, in the order of ranks: ``(1, 3)``. Which part of the model a stage has is
            searched. None searches, unless something else that is fixed refers to the axes of the mesh: pins, zero,
            named axes, or mesh_search=False; unequal numbers only between the groups of a cluster.
        microbatches: pieces of the batch that a step computes one after the other, accumulating gradients.
        batch_statistics: what operations that couple the samples of a batch (batch norm in training, contrastive
            losses, the balance of experts) see where a step is divided into microbatches. ``"batch"``: the whole batch,
            or the model is not divided. ``"microbatch"``: such a model is divided, and every microbatch is a batch of
            its own, as in a loop that accumulates gradients of ``loss / microbatches``: the loss of a step is the mean
            of those of its microbatches, and running statistics are updated by one after the other. Models without
            such operations are not affected.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zb-h1"`` or ``"zb-v"``
            (:mod:`autopar.schedule.named`), or ``"solved"``: a solver builds it for the times and memory of the best of
            these.
        precision: ``"bf16"`` or ``"fp16"``: products in 16 bits as under :class:`torch.autocast`, with parameters,
            gradients and optimizer state in float32, and under fp16 a scaled loss (:mod:`autopar.precision`).
            ``"fp32"`` or None: the model's own dtypes. The planner never reduces precision by itself.
        recompute: which values saved for backward are recomputed instead of retained: ``"none"``; ``"selective"``: the
            inside of attention; ``"full"``: all but the inputs of layers (the elements of the model's lists of
            modules). None: whatever makes the step fit into memory at least cost, nothing if it fits without.
        offload: what rests outside of the device's memory. ``"optimizer"`` state, in host memory or on a local disk
            (``"nvme"``, in a folder of ``$AUTOPAR_OFFLOAD``), is on the device only for its update; saved
            ``"activations"``, in host memory, only in the forward and backward that compute with them; ``"weights"``,
            in host memory of processes without accelerators, for each use. A dict fixes the tier of each kind,
            ``{"optimizer": "nvme", "activations": "device"}``; so does text, ``"optimizer=nvme"``.
            What it does not name is searched. True: the state of every parameter in host memory; False: nothing; None:
            whatever makes the step fit into memory at least cost, nothing if it fits without.
            ``model.optimizer(...)`` implements it for the state.
        seed: decides what the model draws (dropout, noise), how a meta model is initialised, and how the solver breaks
            ties; default: torch's initial seed on rank 0, and 0 for the solver. As for :func:`torch.manual_seed`, a
            number from -2**63 to 2**64 - 1; a negative one is the same as that plus 2**64.
        check_inputs: when ranks compare the values of their inputs, which must be the same global batch on each:
            ``"first"``: at the 1st, 2nd, 4th, 8th, ... call of a kind; ``"always"``: at every call. In both cases
            every call begins with one small exchange (about a millisecond on one host), so that ranks whose calls
            differ in shape, mode or structure all get an error instead of waiting for each other. ``"never"``: no
            comparison and no exchange.
        last_batch: how to run a training batch whose size the plan's shards or microbatches do not divide, such as the
            last of an epoch. ``"replicate"``: calls of that size get a program of their own with the same placements of
            parameters; shards may be uneven, work repeated, and microbatches fewer. Loss and gradients are those of
            that batch on one device. ``"pad"``: ``model(...)`` with fewer rows than planned repeats the last one up to
            the planned size, runs the program of that size, and returns the outputs of the real rows; random numbers
            are those of the smaller batch. :class:`AutoparError` if rows influence each other (batch norm in training,
            a loss inside the model) and from ``step``. One row, or more than planned: as under ``"replicate"``.
            ``"error"``: :class:`PlanMismatchError` (:class:`OptionsError` for microbatches).
        pad_to: token sequences are padded to a multiple of this length, by ``model.step``, ``model.padded`` and
            ``model.dataloader``, so that batches of many lengths share a few programs. What is added is ignored: labels
            of -100, positions that the attention mask excludes, which is added where forward takes one. A model whose
            forward takes none must not look at later positions. None: no padding.
        timeout: seconds for which ranks wait for one that does not answer, or rests, before every rank raises
            :class:`FaultError`; at least four predicted steps. Ranks that died, or wait for each other in different
            calls, are named within seconds whatever it is. While a rank plans, or rests outside of autopar, others wait
            ten times as long, and for one that computes, reads or writes as long as the process group's own timeout
            allows. 0: no watch (docs/faults.md).
        check_every: at every so many-th ``model.step``, or call for ``loss.backward()``, ranks compare hashes of the
            parameters that they hold in common, and look for NaN and infinities in the loss and the gradients;
            :class:`ValueFaultError` names the ranks and the parameter, or the module in which they begin. None: never.
        nonfinite: what a checked step with NaN or infinities does: ``"raise"``; ``"skip"``: it leaves no gradients, so
            that the optimizer does nothing, and the buffers of before.
        compile: whether the operations between collectives are compiled by Inductor, torch's compiler, at the first
            step; ``"auto"``: on GPUs, and not on CPUs. Plans are priced accordingly (docs/compile.md).
        sync: how the replicas of the outermost axis of the mesh stay together. ``"every-step"``: by the gradients of
            every step, as one device. :class:`autopar.LocalSGD`, :class:`autopar.DiLoCo`, :class:`autopar.Gossip`: by
            fewer or smaller exchanges of parameters, for slow links; numbers are then others
            (docs/howto/slow-links.md). The plan is that of one replica, on the inner axes.
        mode: ``"training"``, or ``"inference"``: forward alone, without gradients and optimizer state, as
            ``autopar.plan(..., mode="inference")`` and ``autopar.parallelize(..., mode="inference")`` set it.
        objective: of inference plans. ``"latency"``: the seconds of one step for the given batch. ``"throughput"``:
            rows per second; the batch is doubled as long as it fits into memory and rows per second grow, and the plan
            is for that batch.
        cache_length: of inference plans for causal language models of transformers: the tokens of each sequence that
            the key-value cache holds. The plan is then for one step of generation, a token for each sequence, and
            counts the cache as memory. None: the plan is for forward on the batch as it is, and ``generate`` takes
            the length that each call needs.
        imbalance: the rows of the busiest of the devices that share the experts of a block, relative to their mean, by
            which blocks and their exchanges are priced; :func:`autopar.expert_imbalance` measures it. None: 1, all
            experts are chosen equally often, which losses that balance routers aim at.
        layout: restricts the search to plans of this layout, by those of its fields that are given; the rest is
            searched (docs/layouts.md, "A layout as a restriction"). What it says of ``stages`` (``pipeline``),
            ``schedule``, ``recompute``, ``zero``, ``offload`` and ``precision`` becomes the value of these options.
        given: the options that were given, set by itself: beside a plan, these are asked for even where they have the
            defaults.
        from_layout: which values came from ``layout``, so that :func:`dataclasses.replace` may give another. Not for
            users.
    """

    memory_limit: int | str | None = None
    microbatches: int | None = None
    batch_statistics: Literal["batch", "microbatch"] = "batch"
    stages: int | tuple[int, ...] | None = None
    schedule: str | None = None
    precision: Precision | None = None
    recompute: Literal["none", "selective", "full"] | None = None
    offload: bool | str | Mapping[str, str | None] | None = None
    zero: Literal[0, 1, 2, 3] | None = None
    pins: Mapping[str, str] = field(default_factory=dict)
    time_limit: float | None = None
    # Chosen: within a percent is less than prices are off by.
    gap: float = 0.01
    seed: int | None = None
    mesh_search: bool = True
    optimizer: str = "adamw"
    check_inputs: Literal["first", "always", "never"] = "first"
    last_batch: Literal["replicate", "pad", "error"] = "replicate"
    pad_to: int | None = None
    # Chosen: far longer than ranks of a step are apart, and short beside the day that a silent job would lose.
    timeout: float = 60.0
    check_every: int | None = None
    nonfinite: Literal["raise", "skip"] = "raise"
    compile: Literal["auto"] | bool = "auto"
    sync: Sync = EVERY_STEP
    mode: Literal["training", "inference"] = "training"
    objective: Literal["latency", "throughput"] = "latency"
    cache_length: int | None = None
    imbalance: float | None = None
    layout: Layout | None = None
    given: tuple[str, ...] = field(default=(), repr=False, compare=False, kw_only=True)
    from_layout: tuple[tuple[str, object], ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        self._take_from_layout()
        if self.optimizer not in OPTIMIZERS:
            names = ", ".join(sorted(OPTIMIZERS))
            raise OptionsError(
                f"unknown optimizer {self.optimizer!r}: its bytes of state are not known; one of {names}"
            )
        if self.zero not in (None, *CHOICES["zero"]) or isinstance(self.zero, bool):
            raise OptionsError(f"zero={self.zero!r} is not a ZeRO stage; one of 0, 1, 2, 3, or None to search")
        self._check_numbers()
        for name in ("last_batch", "check_inputs", "nonfinite", "mode", "objective", "batch_statistics"):
            if getattr(self, name) not in CHOICES[name]:
                words = ", ".join(map(repr, CHOICES[name]))
                raise OptionsError(f"{name}={getattr(self, name)!r} is not known; one of {words}")
        for name in ("schedule", "recompute"):
            if getattr(self, name) not in (None, *CHOICES[name]):
                words = ", ".join(map(repr, CHOICES[name]))
                raise OptionsError(f"{name}={getattr(self, name)!r} is not known; one of {words}, or None to search")
        if self.precision not in (None, *PRECISIONS):
            raise OptionsError(f"precision={self.precision!r} is not known; one of {', '.join(PRECISIONS)}, or None")
        asked(self.offload)
        if self.compile != "auto" and not isinstance(self.compile, bool):
            raise OptionsError(f"compile={self.compile!r} is not 'auto', True or False")
        check_sync(self.sync)
        if self.mode == "inference" and self.sync != EVERY_STEP:
            raise OptionsError(
                f"sync={self.sync!r} is of training, and mode='inference' has no optimizer steps after which replicas "
                "could exchange: leave sync out"
            )
        self._check_mode()
        pins: object = self.pins
        if not isinstance(pins, Mapping) or not all(isinstance(text, str) for pair in pins.items() for text in pair):
            raise OptionsError(
                f"pins={pins!r} is not a dict of strings; write paths and placements, such as "
                "{'lm_head.weight': 'S(0),R', 'layers.3': 'stage 1'}"
            )

    def _check_mode(self) -> None:
        """Raises :class:`OptionsError` for options of training under inference."""
        for name in ("zero", "offload", "recompute", "sync") if self.mode == "inference" else ():
            if getattr(self, name) not in (None, False, "none", 0, EVERY_STEP):
                raise OptionsError(
                    f'{name}={getattr(self, name)!r}, mode="inference": there are no gradients, optimizer state or '
                    f"values saved for backward to place or to exchange; leave {name} out"
                )

    def _take_from_layout(self) -> None:
        for name, value in self.from_layout:
            if getattr(self, name) == value:  # Otherwise the user has replaced it.
                object.__setattr__(self, name, None)
        object.__setattr__(self, "from_layout", ())
        if self.layout is None:
            return
        check_layout(self.layout)
        for name, value in shared_options(self.layout).items():
            own = getattr(self, name)
            if own not in (None, value):
                field_name = next(field for field, option in SHARED.items() if option == name)
                raise OptionsError(
                    f"Options({name}={own!r}, layout=Layout({field_name}={value!r})) contradict each other: leave one "
                    "of them out"
                )
            if own is None:
                object.__setattr__(self, name, value)
                object.__setattr__(self, "from_layout", (*self.from_layout, (name, value)))

    @property
    def memory_bytes(self) -> int | None:
        """``memory_limit`` as a number."""
        return None if self.memory_limit is None else int(self.memory_limit)

    @property
    def solver_seconds(self) -> float:
        """What the solvers of one plan may take together: seconds, or counted work if no limit is given."""
        return COUNTED_SECONDS if self.time_limit is None else self.time_limit

    @property
    def solver_seed(self) -> int:
        """The seed of the solvers, which take 31 bits."""
        return (self.seed or 0) & 0x7FFF_FFFF

    def _check_numbers(self) -> None:
        if self.seed is not None and (type(self.seed) is not int or not -(2**63) <= self.seed < 2**64):
            raise OptionsError(
                f"seed={self.seed!r} is not a seed: a whole number from -2**63 to 2**64 - 1, as for "
                "torch.manual_seed, or None for torch's own seed"
            )
        counts = {"microbatches": "to search", "stages": "to search", "check_every": "for never", "pad_to": "for none"}
        counts["cache_length"] = "for the length that each call needs"
        if isinstance(self.stages, (tuple, list)):
            del counts["stages"]
            self._check_stages(tuple(self.stages))
        for name, none in counts.items():
            if getattr(self, name) is not None and (type(getattr(self, name)) is not int or getattr(self, name) < 1):
                raise OptionsError(f"{name}={getattr(self, name)!r} is not a positive whole number, or None {none}")
        if self.memory_limit is not None:
            object.__setattr__(self, "memory_limit", bytes_of(self.memory_limit, "memory_limit"))
        numbers = (("time_limit", "seconds"), ("gap", "a relative distance, such as 0.01"), ("timeout", "seconds"))
        for name, what in numbers:
            if (name, getattr(self, name)) != ("time_limit", None) and not _is_number(getattr(self, name), 0):
                raise OptionsError(f"{name}={getattr(self, name)!r}: not {what}, 0 or more")

        if self.imbalance is not None and not _is_number(self.imbalance, 1):
            raise OptionsError(
                f"imbalance={self.imbalance!r} is not a number of at least 1: the rows of the busiest device relative "
                "to the mean, such as 1.2; autopar.expert_imbalance(model, batch, devices) measures it"
            )

    def _check_stages(self, stages: tuple[object, ...]) -> None:
        """Checks the numbers of devices of several stages, and keeps them as a tuple."""
        if not all(type(count) is int and count > 0 for count in stages):
            raise OptionsError(f"stages={stages} are not numbers of devices, at least 1 for each stage")
        if len(stages) < 2:
            raise OptionsError(f"stages={stages} gives the devices of one stage: stages=1 has all of them")
        if self.layout is not None:
            raise OptionsError(
                f"Options(stages={stages}, layout=...): a layout divides every stage alike; leave one of them out"
            )
        object.__setattr__(self, "stages", stages)


def _is_number(value: object, least: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < math.inf


def without_stages(options: Options) -> Options:
    """``options`` with one stage and one microbatch, unless they fix stages, microbatches or a schedule."""
    requested = options.stages is not None or options.microbatches is not None or options.schedule is not None
    requested |= options.layout is not None and not {"microbatch", "interleave"}.isdisjoint(options.layout.given)
    return options if requested else replace(options, stages=1, microbatches=1)


def under_policy(options: Options, planned: Precision) -> Options:
    """``options`` with the precision policy that a plan was made for. Raises :class:`PlanMismatchError` if they fix
    another."""
    if options.precision not in (None, planned):
        raise PlanMismatchError(
            f"the plan was made for precision={planned!r}, but Options(precision={options.precision!r}) is asked for: "
            "leave it out to run as planned, or make a plan for it"
        )
    return replace(options, precision=planned)
