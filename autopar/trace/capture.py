"""Runs a model on fake tensors and captures its joint forward and backward as one torch.fx graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from torch import nn

from autopar.errors import TraceError
from autopar.rare_collections import collecting_rarely
from autopar.torch_internals.fake_tensors import (
    FakeTensorMode,
    ShapeEnv,
    conditions,
    enable_python_dispatcher,
    expression_of,
    hint_of,
    new_symbol,
    shape_environment,
    without_error_log,
)
from autopar.torch_internals.joint_graphs import export_joint, notes_of, preserve_node_meta
from autopar.torch_internals.modules import buffers_of, parameters_of
from autopar.torch_internals.replacements import exporting
from autopar.torch_internals.tensors import as_parameter
from autopar.trace.decompositions.general import decomposition_table
from autopar.trace.guards.random_numbers import notes_on_draws
from autopar.trace.guards.reads import Reads
from autopar.trace.masked_rows.mode import SelectedRows

from .call import Call, Differentiate, Returned, collect_outputs
from .counters import (
    CallRecord,
    ModuleAttributes,
    Operations,
    attributes_of,
    changed,
    containers,
    counted,
    counters,
    refilled,
    with_attributes,
)
from .lengths import BATCH, Lengths, fresh_prime, prime_below, real_lengths
from .loss import LossFunction, run_with_loss
from .model_state import State, exchanged
from .moe_blocks import experts_as_operations
from .outline import outline
from .patches import patched
from .record import PATH, PLACE, Recorder, Recording, UnrecordedError
from .repeated_calls import RepeatedCalls, has_changed_python
from .replay import Bodies, capture_outlined
from .running_module import ModuleTracker

# Models are traced on fake tensors of the processor, whatever they run on: one graph for every device, also where torch
# was built without that device, or there is none (autograd on fake tensors of CUDA needs a GPU).
CAPTURE_DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class Request:
    """What to trace: see :func:`autopar.trace.tracer.trace`. ``device`` is the kind that the model is written for: what
    its code says of it is said of the device that it is traced on. ``lengths``: further sizes of inputs that become
    symbols (:mod:`.lengths`)."""

    model: nn.Module
    state: tuple[State, ...]
    call: Call
    device: torch.device
    loss_fn: LossFunction | None
    training: bool
    grad: bool
    differentiate: Differentiate
    reads: Reads
    autocast: torch.dtype | None = None
    lengths: Lengths = ()


@dataclass(frozen=True)
class Captured:
    """A joint graph of torch.fx. ``symbols`` are torch's symbols for the batch size, if it has one, and for lengths, by
    the graph's names; ``guards`` are conditions on them. ``counted`` are the plain numbers that calls of modules count,
    by path. ``bodies`` has the graphs of the calls taken out of line, if any; ``notes`` are for people.
    """

    graph_module: torch.fx.GraphModule
    returned: Returned
    symbols: Mapping[str, sympy.Symbol]
    guards: tuple[sympy.Basic, ...]
    counted: tuple[str, ...] = ()
    bodies: Bodies | None = None
    notes: tuple[str, ...] = ()


class Step(nn.Module):
    """One call of the model as a function of flat tensors; its own parameters and buffers ``t0, t1, ...``
    are the model's state.
    """

    def __init__(
        self, request: Request, tensors: Sequence[torch.Tensor], tracker: ModuleTracker, selected: SelectedRows
    ) -> None:
        super().__init__()
        self.returned = Returned()
        self.counted: tuple[str, ...] = ()
        self.refilled: tuple[str, ...] = ()
        # Bypasses nn.Module's registration: as a submodule, the model would have its parameters lifted too.
        self.__dict__["request"], self.__dict__["tracker"] = request, tracker
        self.__dict__["selected"] = selected
        for index, (entry, tensor) in enumerate(zip(request.state, tensors, strict=True)):
            members = parameters_of(self) if entry.role == "param" else buffers_of(self)
            members[f"t{index}"] = tensor  # type: ignore[assignment]

    def _state(self, index: int) -> torch.Tensor:
        name = f"t{index}"
        tensor = parameters_of(self)[name] if name in parameters_of(self) else buffers_of(self)[name]
        assert tensor is not None
        return tensor

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The model's outputs, and the loss, in the order of :class:`Returned`."""
        self.__dict__["tracker"].restart()
        self.__dict__["selected"].restart()
        with self._prepared(inputs) as (request, args, kwargs):
            before, contents = counters(request.model), containers(request.model)
            with request.reads.following(), request.reads.generators.watching():
                output, loss = run_with_loss(request.model, request.loss_fn, args, kwargs)
            self.counted = changed(before, counters(request.model))
            self.refilled = refilled(contents, request.model)
            return collect_outputs(output, loss, request.differentiate, self.returned)

    def draws(self, *inputs: torch.Tensor) -> tuple[str, ...]:
        """Notes on numbers that the model draws from generators other than torch's."""
        request, tracker = self.__dict__["request"], self.__dict__["tracker"]

        def run() -> object:
            tracker.restart()
            return self._run_again(inputs, (), other_mode=False).operations

        return notes_on_draws(request.reads.generators, run, lambda: tracker.path, type(request.model).__name__)

    def counts_on(self, *inputs: torch.Tensor) -> tuple[str, ...]:
        """Which of the changed numbers a graph must not contain as constants, see :func:`counted`."""
        return counted(
            partial(self._run_again, inputs),
            self.counted,
            (*self.refilled, *self.__dict__["request"].reads.before.rewritten),
        )

    def _run_again(
        self, inputs: Sequence[torch.Tensor], attributes: Sequence[ModuleAttributes], *, other_mode: bool
    ) -> CallRecord:
        """Records what a step runs if the modules have ``attributes``: with its backward, even if the trace has none,
        since the other mode may be training."""
        self.__dict__["selected"].restart()
        with self._prepared(inputs) as (request, args, kwargs), torch.enable_grad():
            tensors = [*(self._state(index) for index in range(len(request.state))), *inputs]
            originals = [*(entry.tensor for entry in request.state), *request.call.tensors.values()]
            trainable = [t.requires_grad_() for t, real in zip(tensors, originals, strict=True) if real.requires_grad]
            with_attributes(request.model, attributes)
            if other_mode:
                request.model.train(not request.training)
            returned = Returned()
            with Operations(tensors) as operations, request.reads.restoring():
                if attributes:
                    request.reads.before.carry()
                output, loss = run_with_loss(request.model, request.loss_fn, args, kwargs)
                outputs = collect_outputs(output, loss, request.differentiate, returned)
                operations.add((returned.order, returned.constants, outputs, _gradients(outputs, trainable)))
            return CallRecord(operations.seen, counters(request.model), attributes_of(request.model))

    @contextmanager
    def _prepared(self, inputs: Sequence[torch.Tensor]) -> Iterator[tuple[Request, tuple[Any, ...], dict[str, Any]]]:
        """Gives the model this step's tensors and the requested mode, and yields the arguments of its call."""
        request: Request = self.__dict__["request"]
        args, kwargs = request.call.rebuild(inputs)
        tensors = [self._state(index) for index in range(len(request.state))]
        state = exchanged(request.model, request.state, tensors)
        with state, torch.set_grad_enabled(request.grad), _autocast(request):
            # Parts of the model may be in another mode on purpose (a frozen batch norm): leave them alone if the model
            # itself is in the requested mode.
            if request.model.training != request.training:
                request.model.train(request.training)
            yield request, args, kwargs


def _gradients(outputs: Sequence[torch.Tensor], trainable: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    ends = [output for output in outputs if output.requires_grad]
    tangents = [torch.ones_like(end) for end in ends]
    return torch.autograd.grad(ends, trainable, tangents, allow_unused=True) if ends and trainable else ()


def _sizes(request: Request) -> set[int]:
    tensors = [*(entry.tensor for entry in request.state), *request.call.tensors.values()]
    return {int(size) for tensor in tensors for size in tensor.shape} | {request.call.batch}


def _fake(tensor: torch.Tensor, shape: Sequence[Any], request: Request) -> torch.Tensor:
    needs_grad = tensor.requires_grad and request.grad
    fake = torch.empty(tuple(shape), dtype=tensor.dtype, device=CAPTURE_DEVICE, requires_grad=needs_grad)
    return as_parameter(fake) if isinstance(tensor, nn.Parameter) else fake


def _fake_inputs(request: Request, sizes: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """Inputs of the real shapes, but for the ``sizes`` that have symbols, by name."""

    def shape(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
        real: list[Any] = list(tensor.shape)
        if BATCH in sizes and real and real[0] == request.call.batch:
            real[0] = sizes[BATCH]
        for length in request.lengths:
            if length.symbol in sizes and length.input == name:
                real[length.dim] = sizes[length.symbol]
        return tuple(real)

    return tuple(_fake(tensor, shape(name, tensor), request) for name, tensor in request.call.tensors.items())


def _symbols(environment: ShapeEnv | None, request: Request) -> dict[str, torch.SymInt]:
    """A symbolic size for the batch and for each length; they compare like different primes."""
    if environment is None:
        return {}
    taken = _sizes(request)
    sizes = {BATCH: new_symbol(environment, "batch", fresh_prime(taken, request.call.batch))}
    for name, real in real_lengths(request.lengths, request.call.tensors).items():
        taken |= set(map(hint_of, sizes.values()))
        sizes[name] = new_symbol(environment, name, prime_below(taken, real))
    return sizes


def capture(
    request: Request, tracker: ModuleTracker, *, symbolic: bool, outlined: bool = False, select: bool = False
) -> Captured:
    """Captures the joint graph, with symbols for the batch size and lengths or with the real sizes; ``outlined``: with
    equal calls of modules captured once; ``select``: with rows selected by values as masks. Raises whatever the model
    or torch raise, and :class:`UnrecordedError` if nothing can be outlined.
    """
    environment = shape_environment() if symbolic else None
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment)
    sizes = _symbols(environment, request)
    with mode:
        inputs = _fake_inputs(request, sizes)
        tensors = [_fake(entry.tensor, entry.tensor.shape, request) for entry in request.state]
    selected = SelectedRows(lambda: tracker.path)
    step = Step(request, tensors, tracker, selected)
    with ExitStack() as stack:
        for context in (
            collecting_rarely(),
            exporting(),  # Models, transformers' above all, then take paths free of data-dependent checks.
            without_error_log(),
            patched(request.device.type),
            experts_as_operations(request.model, request.autocast),
            preserve_node_meta(),
            selected if select else nullcontext(),
        ):
            stack.enter_context(context)
        stack.enter_context(torch.set_grad_enabled(request.grad))
        with tracker.listening():
            if not outlined:
                graph_module, bodies = _export(mode, step, inputs), None
        if outlined:
            graph_module, bodies = _outlined(mode, step, tensors, inputs, tuple(sizes.values()))
        notes = (*selected.notes(), *_drawn(mode, step, inputs, symbolic))
        guards = tuple(conditions(environment)) if environment is not None else ()
        numbers = _counted(mode, step, inputs, symbolic)
    symbols = {name: expression_of(size) for name, size in sizes.items()}
    return Captured(graph_module, step.returned, symbols, guards, numbers, bodies, notes)


def _counted(mode: FakeTensorMode, step: Step, inputs: Sequence[torch.Tensor], symbolic: bool) -> tuple[str, ...]:
    """The plain numbers that calls of the model count, and whatever else they change and read; if a second call fails,
    all numbers that change."""
    paths, reads = step.counted, step.__dict__["request"].reads
    if step.counted or step.refilled or reads.before.rewritten:
        with suppress(Exception), _dispatching(symbolic), mode:
            paths = step.counts_on(*inputs)
    return (*paths, *(path for path in reads.written if path not in paths))


def _drawn(mode: FakeTensorMode, step: Step, inputs: Sequence[torch.Tensor], symbolic: bool) -> tuple[str, ...]:
    """Notes on draws that are not operations."""
    request: Request = step.__dict__["request"]
    if not request.reads.generators.drawn:
        return ()
    tracker: ModuleTracker = step.__dict__["tracker"]
    with tracker.listening(), _dispatching(symbolic), mode:
        return step.draws(*inputs)


def _dispatching(symbolic: bool) -> AbstractContextManager[Any]:
    """Enables torch's Python dispatcher, as torch's own tracer does, since the C++ code of some operations would fix a
    symbolic size."""
    return enable_python_dispatcher() if symbolic else nullcontext()


def _export(mode: FakeTensorMode, module: nn.Module, inputs: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    return export_joint(mode, module, inputs, decomposition_table())


def _outlined(
    mode: FakeTensorMode,
    step: Step,
    tensors: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    sizes: tuple[torch.SymInt, ...],
) -> tuple[torch.fx.GraphModule, Bodies]:
    """The joint graphs of the model's operations, which one run of it records."""
    record = partial(_recorded, mode, step, tensors, inputs, partial(_dispatching, bool(sizes)))
    recording = record(skips=True) or record(skips=False)
    assert recording is not None
    program = outline(recording, len(inputs))
    if not program.sites:
        raise UnrecordedError("no two calls of modules are equal")
    with _without_autocast():  # The casts of autocast are already recorded.
        with mode:
            symbol_inputs = [torch.empty((size,), device=CAPTURE_DEVICE) for size in sizes]
        return capture_outlined(step, inputs, program, symbol_inputs, mode, partial(_export, mode))


def _recorded(
    mode: FakeTensorMode,
    step: Step,
    tensors: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    dispatching: Callable[[], AbstractContextManager[Any]],
    *,
    skips: bool,
) -> Recording | None:
    """What one run of the model records; ``skips``: without running calls that repeat others. None if it turns out that
    they must run."""
    request, tracker = step.__dict__["request"], step.__dict__["tracker"]
    recorder = Recorder((*inputs, *tensors), tracker.modules)
    repeated = RepeatedCalls(recorder, request.reads, tracker.paths)
    skipping = repeated.skipping(request.model) if skips else nullcontext()
    try:
        with tracker.listening(), dispatching(), mode, recorder.listening(), skipping:
            outputs = step(*inputs)
    except Exception:
        if not repeated.skipped:
            raise
        return None
    if repeated.skipped and has_changed_python(request.reads, step.counted, step.refilled):
        return None
    return recorder.program(len(inputs) + len(tensors), outputs)


def _autocast(request: Request) -> AbstractContextManager[Any]:
    """Autocast to the dtype in which the request computes products: its own, or that of the autocast that is enabled
    for the model's device."""
    own = request.device.type
    if request.autocast is not None:
        return _autocasting(request.autocast)
    if own == CAPTURE_DEVICE.type or not torch.amp.is_autocast_available(own):
        return nullcontext()
    return _autocasting(torch.get_autocast_dtype(own) if torch.is_autocast_enabled(own) else None)


def _without_autocast() -> AbstractContextManager[Any]:
    return _autocasting(None) if torch.is_autocast_enabled(CAPTURE_DEVICE.type) else nullcontext()


@contextmanager
def _autocasting(dtype: torch.dtype | None) -> Iterator[None]:
    """Casts products to ``dtype``, or not at all; :class:`torch.autocast` would only warn of an unknown dtype and do
    nothing. Disables torch's cache of casts, which would outlive a trace; equal casts are merged later. Raises
    :class:`TraceError` if torch cannot cast."""
    device = CAPTURE_DEVICE.type
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    try:
        _set_autocast(device, dtype is not None, dtype or before[1], False)
        if torch.is_autocast_enabled(device) != (dtype is not None):
            raise TraceError(f"torch does not cast to {dtype}: leave precision out")
        yield
    finally:
        _set_autocast(device, *before)


def _set_autocast(device: str, enabled: bool, dtype: torch.dtype, cached: bool) -> None:
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_cache_enabled(cached)


def module_path_of(node: torch.fx.Node) -> str | None:
    """The path recorded by :class:`ModuleTracker`, or None."""
    path: str | None = notes_of(node).get(PATH)
    return path


def place_of(node: torch.fx.Node) -> int | None:
    """The index of the body's operation that a node came from, or None."""
    place: int | None = notes_of(node).get(PLACE)
    return place
