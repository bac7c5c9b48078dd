"""Traces a model: runs it once on fake tensors and returns its joint forward and backward graph.

Nothing is computed and nothing allocated: parameters, buffers and inputs (real, meta or fake) are replaced by fake
tensors on the requested device, and restored afterwards, also after an error.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import sympy
import torch
from torch import nn

from autopar.errors import FixedLengthError, TraceError
from autopar.ir.graph import Graph
from autopar.ir.node import symbol
from autopar.ir.signature import Signature
from autopar.torch_internals.modules import buffers_of, is_lazy, is_persistent, parameters_of
from autopar.trace.guards.guards import Guards, guards_of
from autopar.trace.guards.random_numbers import DrawError
from autopar.trace.guards.read_names import Names, names_of
from autopar.trace.guards.reads import Reads
from autopar.trace.masked_rows.branches import SelectionError

from .call import Differentiate, Returned, check_rows, describe_call
from .capture import Captured, Request, capture
from .convert import convert
from .counters import warn_of_counters
from .dtypes import check_dtypes
from .explain_errors import explain, explain_call, is_data_dependent
from .lengths import BATCH, Lengths, real_lengths
from .loss import LossFunction, check_loss
from .model_state import State, model_state, unchanged
from .running_module import ModuleTracker


@dataclass(frozen=True)
class Traced:
    """A traced model.

    ``parameters`` maps the canonical path of each parameter to whether it requires a gradient, ``buffers`` that of each
    buffer to whether it belongs to the ``state_dict``; both in the model's order. ``guards`` are conditions on the
    symbolic sizes under which the model runs the same operations (``b > 4``), ``reads`` guard what it read from Python
    objects, and ``read_names`` are the names of these reads. ``counted`` are numbers that the model counts itself,
    which gives a warning. ``notes`` tell people what tracing made more expensive than it looks.
    """

    graph: Graph
    signature: Signature
    parameters: Mapping[str, bool]
    buffers: Mapping[str, bool]
    guards: tuple[sympy.Basic, ...] = ()
    notes: tuple[str, ...] = ()
    reads: Guards = field(default_factory=Guards)
    read_names: Names = ()
    counted: tuple[str, ...] = ()

    def holds_for(self, batch: int) -> bool:
        """Whether the graph holds for this batch size."""
        return _all_hold(self.guards, {symbol(BATCH): batch})

    def holds_at(self, sizes: Mapping[str, int]) -> bool:
        """Whether the graph holds at these sizes of all its symbols."""
        return _all_hold(self.guards, {symbol(name): size for name, size in sizes.items()})

    def fixed(self, lengths: Mapping[str, int]) -> Traced | None:
        """The trace at these sizes of inputs: its guards, of which the batch size stays symbolic, and not its graph,
        which :class:`~autopar.planner.prepare.Prepared` has in normal form. None if it holds for no batch size there.
        For a certain one :meth:`holds_for` says it."""
        sizes = {symbol(name): size for name, size in lengths.items()}
        guards = tuple(guard.subs(sizes) for guard in self.guards)
        if any(guard == sympy.false for guard in guards):
            return None
        return replace(self, guards=tuple(g for g in guards if g != sympy.true))


def trace(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str,
    loss_fn: LossFunction | None = None,
    training: bool | None = None,
    grad: bool = True,
    differentiate: Differentiate = "loss",
    autocast: torch.dtype | None = None,
) -> Traced:
    """Captures ``model(*args, **kwargs)`` and its backward as one graph.

    Inputs are any tree of tensors and constants; the trace fixes the constants. If the tensors share
    their dim 0 (its most common size is 2 or more), that size becomes the symbol ``b`` of the graph; if
    the model cannot be captured in this way, every size is the real one and ``graph.symbols`` is empty. Outputs are
    any tree, rebuilt with the same types; a leaf that is neither a tensor nor a constant, such as a key-value
    cache, becomes None and is named in ``signature.lost``. The model may write into its inputs: it has its
    own copy of them.

    ``loss_fn(output)``, ``loss_fn(output, batch)`` or ``loss_fn(output, targets)`` (of the keyword input ``targets``;
    see :mod:`.loss`) adds the graph output ``loss``. Without one the loss is the output called
    ``loss``, or else the only scalar output that requires a gradient. ``differentiate="loss"`` gives only
    the loss a tangent if there is one, ``"all"`` every output that requires a gradient. ``training`` sets
    the mode of the model during the trace (None: as it is); ``grad=False`` captures the forward alone. ``autocast``
    runs model and loss under :class:`torch.autocast` to that dtype, whose casts become operations.

    Raises:
        TraceError: names the module, the line of the model's code, and what to do.
    """
    return traced_request(
        request_for(
            model,
            args,
            kwargs,
            device=device,
            loss_fn=loss_fn,
            training=training,
            grad=grad,
            differentiate=differentiate,
            autocast=autocast,
        )
    )


def request_for(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str,
    loss_fn: LossFunction | None = None,
    training: bool | None = None,
    grad: bool = True,
    differentiate: Differentiate = "loss",
    autocast: torch.dtype | None = None,
    lengths: Lengths = (),
) -> Request:
    """The request of :func:`trace`, checked as far as possible without tracing. Raises :class:`TraceError`, and
    :class:`OptionsError` for a loss function that is none and for an empty batch."""
    if not isinstance(model, nn.Module):
        raise TraceError(
            f"a {type(model).__name__} is not a torch.nn.Module; wrap the function in a module with a forward"
        )
    _check_modules(model)
    check_loss(loss_fn)
    call = describe_call(tuple(args), kwargs or {})
    check_rows(call)
    return Request(
        model=model,
        state=model_state(model),
        call=call,
        device=torch.device(device),
        loss_fn=loss_fn,
        training=model.training if training is None else training,
        grad=grad,
        differentiate=differentiate,
        autocast=autocast,
        reads=Reads(model, loss_fn),
        lengths=lengths,
    )


def traced_request(request: Request) -> Traced:
    """The trace of a checked request. Raises :class:`TraceError`."""
    model, reads = request.model, request.reads
    assert reads is not None
    with unchanged(model):
        captured, graph = _captured(request)
    check_dtypes(graph, model)
    if captured.counted:
        warn_of_counters(model, captured.counted)
    traced = _traced(request, captured, graph)
    return replace(traced, reads=guards_of(model, reads), read_names=names_of(reads), counted=captured.counted)


def _check_modules(model: nn.Module) -> None:
    """Raises :class:`TraceError` for modules whose parameters have no shape yet, and for TorchScript."""
    for path, module in model.named_modules():
        where = f"module {path!r}" if path else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(f"{where} is TorchScript, which cannot be traced; give the module it was made from")
        tensors = {**parameters_of(module), **buffers_of(module)}
        if any(tensor is not None and is_lazy(tensor) for tensor in tensors.values()):
            raise TraceError(
                f"{where} ({type(module).__name__}) has parameters without a shape; call the model on one batch first"
            )


def _captured(request: Request) -> tuple[Captured, Graph]:
    """Captures the model as it is, or, if that fails because values decide what runs, with selected rows as masks."""
    if request.lengths:
        return _captured_open(request)
    try:
        return _captured_as(request, select=False)
    except TraceError as error:
        if error.__cause__ is None or not is_data_dependent(error.__cause__):
            raise
        first = error
    try:
        return _captured_as(request, select=True)
    except TraceError as second:
        cause = second.__cause__
        if cause is None or isinstance(cause, SelectionError) or is_data_dependent(cause):
            raise
        raise first from second


def _captured_open(request: Request) -> tuple[Captured, Graph]:
    """Captures with symbols for the batch size and for the lengths. Raises :class:`FixedLengthError` if the model fixes
    any of them."""
    for outlined, select in ((True, False), (False, False), (False, True)) if request.call.batch else ():
        found = _attempt(request, symbolic=True, outlined=outlined, select=select)
        if found is not None:
            return found
    raise FixedLengthError("the model runs other operations for other lengths of its inputs")


def _captured_as(request: Request, *, select: bool) -> tuple[Captured, Graph]:
    """Captures with a symbol if the batch size has one and nothing in the model fixes it, else with the real sizes; in
    both cases with equal calls of modules captured once, if possible.
    """
    # Not outlined with selected rows: recordings of them have not always had the right gradients.
    ways = product((True, False) if request.call.batch else (False,), (False,) if select else (True, False))
    for symbolic, outlined in ways:
        if not symbolic and not outlined:
            break
        found = _attempt(request, symbolic=symbolic, outlined=outlined, select=select)
        if found is not None:
            return found
    tracker = ModuleTracker(request.model)
    try:
        captured = capture(request, tracker, symbolic=False, select=select)
        return captured, convert(captured, request)
    except TraceError:
        raise
    except Exception as error:
        wrong = explain_call(error, request.model, *request.call.rebuild(request.call.tensors.values()))
        raise (wrong or explain(error, tracker.path, request.model)) from error


def _attempt(request: Request, *, symbolic: bool, outlined: bool, select: bool) -> tuple[Captured, Graph] | None:
    """One way of several to capture, of which the next may succeed if this one fails; if the last fails too, its
    message has plain numbers."""
    try:
        with _without_backward_traces():
            tracker = ModuleTracker(request.model)
            captured = capture(request, tracker, symbolic=symbolic, outlined=outlined, select=select)
            graph = convert(captured, request)
            return None if symbolic and _is_specialised(captured, graph, request) else (captured, graph)
    except DrawError:
        raise
    except Exception:
        return None


@contextlib.contextmanager
def _without_backward_traces() -> Iterator[None]:
    """Suppresses torch's warning, with a stack trace, that backward failed: only one way of several failed here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Error detected in .*Backward")
        yield


def _is_specialised(captured: Captured, graph: Graph, request: Request) -> bool:
    """Whether the symbolic trace holds only for its own hints, or not for the real sizes."""
    if not all(isinstance(theirs, sympy.Symbol) for theirs in captured.symbols.values()):
        return True  # It is a number now.
    call = request.call
    inputs = {node.target: node.type.shape for node in graph.inputs if node.type.rank}
    others = {length.input for length in request.lengths if length.dim == 0}
    with_batch = [inputs[n][0] for n in inputs if n not in others and call.tensors[n].shape[0] == call.batch]
    fixed = any(size != symbol(BATCH) for size in with_batch)
    of_lengths = [inputs[length.input][length.dim] == symbol(length.symbol) for length in request.lengths]
    returned = any(isinstance(constant, sympy.Basic) for constant in captured.returned.constants.values())
    real = {BATCH: call.batch, **real_lengths(request.lengths, call.tensors)}
    held = _all_hold(captured.guards, {theirs: real[name] for name, theirs in captured.symbols.items()})
    return fixed or not all(of_lengths) or returned or not held


def _all_hold(guards: tuple[sympy.Basic, ...], sizes: Mapping[sympy.Symbol, int]) -> bool:
    return all(bool(guard.subs(sizes)) for guard in guards)


def _traced(request: Request, captured: Captured, graph: Graph) -> Traced:
    names = {theirs: symbol(name) for name, theirs in captured.symbols.items()}
    guards = tuple(guard.subs(names) for guard in captured.guards)
    return traced_call(request, captured.returned, graph, guards, captured.notes)


def traced_call(
    request: Request, returned: Returned, graph: Graph, guards: tuple[sympy.Basic, ...], notes: tuple[str, ...]
) -> Traced:
    """The trace of ``graph`` for a request, without its reads."""
    parameters = {s.name: s.tensor.requires_grad for s in request.state if s.role == "param"}
    buffers = {s.name: _is_persistent(s) for s in request.state if s.role == "buffer"}
    return Traced(graph, _signature(request, returned), parameters, buffers, guards, notes)


def _is_persistent(entry: State) -> bool:
    slot = entry.slots[0]
    return is_persistent(slot.module, slot.key)


def _signature(request: Request, returned: Returned) -> Signature:
    assert returned.spec is not None
    return Signature(
        input_spec=request.call.spec,
        input_names=request.call.names,
        output_spec=returned.spec,
        output_names=returned.names,
        loss=returned.loss,
        differentiable=returned.differentiable,
        constants=request.call.constants,
        output_constants=returned.constants,
        lost=returned.lost,
        tied={alias: s.name for s in request.state for alias in s.aliases if s.role != "constant"},
        training=request.training,
    )
