"""Explains why a model could not be captured, so that its author can act: module, line, reason, smallest change."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Mapping

import torch

from autopar.content.code_origin import is_model_code
from autopar.errors import TraceError
from autopar.torch_internals.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from autopar.torch_internals.operators import OpOverload
from autopar.trace.masked_rows.branches import SelectionError

from .dtypes import failing_inputs

_BRANCH = (
    "the value of a tensor decides what runs next (.item(), int(), bool(), `if tensor:`, .tolist() or a "
    "Python loop over values), but a graph is captured without values; use torch.where or a mask instead, or "
    "compute the number outside the model"
)
_DRAWN = (
    "a number drawn by torch decides what runs next, anew at each call, but a graph is captured without values; keep "
    "it a tensor, which a graph draws anew at each step: torch.where(torch.rand(()) < p, x, x + self.block(x)) skips "
    "a block"
)
_DRAWS = (
    r"\b(rand|randn|randint|randperm|bernoulli|multinomial|normal)(_like)?\(|\.(bernoulli|uniform|normal|random)_\("
)
_SHAPE = "the shape of a result depends on the values of a tensor, but a graph has fixed shapes; "
_SELECT = (
    "use torch.where or a mask; instead of giving an expert its tokens, give it all and multiply what it returns by "
    "each token's weight for it, zero where it was not chosen; blocks behind transformers' experts interface need no "
    "change"
)
_COUNT = "for counts among n, say so: torch.bincount(x, minlength=n), or torch.histc(x, bins=n, min=0, max=n - 1)"
_OUTSIDE = "take an operation whose result has a size known beforehand, or compute this outside the model"
_PADDED = (
    "packed sequences have one: run the layer over the padded batch (batch_first=True), take the output at each "
    "sequence's last step by torch.gather, and leave padding out of the loss by a mask"
)
# Names of operations -> what to do instead.
_INSTEAD = {
    "_pack_padded_sequence": _PADDED,
    "bincount": _COUNT,
    "histc": _COUNT,
    "nonzero": _SELECT,
    "masked_select": _SELECT,
    "index": _SELECT,
}
_OPERATOR = (
    "this operator has no shape function, so it cannot be traced without data; register one with "
    "torch.library.register_fake, or replace the operator"
)
_DATA = (
    "a tensor with real values is needed here; keep tensors that the model reads in parameters or buffers, "
    "and read no values from inputs"
)
_FORMAT = (
    "a tensor is written out as a number while the model runs, but a graph is captured without values; print outside "
    "the model, or only names, shapes and dtypes"
)
_BACKWARD = (
    "the model calls backward() itself, but the graph holds forward and backward of the whole; return the loss, or use "
    "torch.autograd.grad(..., create_graph=True) for a gradient that the loss depends on"
)
SPARSE = (
    "graphs know dense tensors only; use a dense one, or an index (torch.gather, index_add) where most of it is zeros"
)
_CHANGED = (
    "a tensor that backward needs is changed in place, or is a buffer that forward gives a new value (self.state = "
    "...); use a copy of it (self.state.clone()) where it is used, or change it out of place"
)
_GENERATOR = "a Generator is used here; draw random numbers from torch's own generator (torch.manual_seed)"
# Part of torch's message -> what it means for the author of the model.
_KNOWN = {
    "unsupported format string passed to": _FORMAT,
    "Cannot backprop through mirrored meta": _BACKWARD,
    "has been modified by an inplace operation": _CHANGED,
    # Until 2.13, where the graph holds it, and converting the graph fails.
    "torch._C.Generator": _GENERATOR,
    "at dispatch key DispatchKey.Sparse": f"a tensor is sparse, but {SPARSE}",
}


def is_data_dependent(error: BaseException) -> bool:
    """Whether tracing failed because values decide what runs; no other way of tracing would help then."""
    kinds = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
    text = str(error)
    return isinstance(error, kinds) or "_local_scalar_dense" in text or "data-dependent" in text.lower()


def explain(error: BaseException, module: str, model: torch.nn.Module) -> TraceError:
    """A :class:`TraceError` for ``error``, raised while the module at path ``module`` ran."""
    location = user_location(error)
    where = (
        f"in module {module!r} ({type(model.get_submodule(module)).__name__})"
        if module
        else f"in {type(model).__name__}"
    )
    at = f" at {location[0]}\n    {location[1]}" if location else ""
    reason = _reason(error, location[1] if location else "")
    inputs = failing_inputs(error, model)
    return TraceError(f"{type(model).__name__} could not be captured as one graph: {where}{at}\n{reason}{inputs}")


def explain_call(
    error: BaseException, model: torch.nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> TraceError | None:
    """A :class:`TraceError` for a call with arguments that ``forward`` does not take; None if ``error`` is another."""
    if not isinstance(error, TypeError):
        return None
    try:
        signature = inspect.signature(model.forward)
        signature.bind(*args, **kwargs)
    except TypeError as wrong:
        return TraceError(
            f"{type(model).__name__} cannot be called so: {wrong}; its forward is forward{signature}. What only a loss "
            "function takes goes to model.step(..., targets=...), with loss_fn given to parallelize"
        )
    except ValueError:  # The signature of forward is unknown.
        pass
    return None


def _reason(error: BaseException, line: str) -> str:
    if isinstance(error, SelectionError):
        return str(error)
    if isinstance(error, DynamicOutputShapeException):
        return f"{_operator_of(error)}{_SHAPE}{_INSTEAD.get(_name_of(error), _OUTSIDE)}"
    if is_data_dependent(error):
        return _DRAWN if re.search(_DRAWS, line) else _BRANCH
    if isinstance(error, UnsupportedOperatorException):
        return f"{_operator_of(error)}{_OPERATOR}"
    if isinstance(error, UnsupportedFakeTensorException) or ".numpy()" in str(error):
        return f"{_DATA}\n{error}"
    reasons = [reason for part, reason in _KNOWN.items() if part in str(error)]
    return reasons[0] if reasons else f"{type(error).__name__}: {error}"


def _operator_of(error: BaseException) -> str:
    operator = _operator(error)
    return f"{operator}: " if operator else ""


def _name_of(error: BaseException) -> str:
    operator = _operator(error)
    return str(operator.overloadpacket.__name__) if operator else ""


def _operator(error: BaseException) -> OpOverload | None:
    operator = getattr(error, "func", error.args[0] if error.args else None)
    return operator if isinstance(operator, OpOverload) else None


def user_location(error: BaseException) -> tuple[str, str] | None:
    """``("file:line", source line)`` of the innermost frame in the model author's code."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if is_model_code(f.filename, f.name)]
    return (f"{own[-1].filename}:{own[-1].lineno}", own[-1].line or "") if own else None


def defined_at(model: torch.nn.Module, path: str) -> str:
    """The module at ``path`` and where its forward is defined, for operations without a recorded line."""
    kind = type(model.get_submodule(path))
    try:
        at = f", whose forward is at {inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind.forward)[1]}"
    except (OSError, TypeError):  # Defined at a prompt.
        at = ""
    return f"in module {path!r} ({kind.__name__}){at}"
