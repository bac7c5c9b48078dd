"""Why a model could not be captured, said so that its author can act: module, line, reason, smallest
change.
"""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections.abc import Mapping

import numpy as np
import sympy
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from .errors import TraceError
from .trace_dtypes import given_where
from .trace_row_regions import SelectionError

_OWN = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, sympy.__file__, np.__file__, __file__))
_HANDLERS = ("__torch_function__", "__torch_dispatch__")
_STANDARD = os.path.dirname(os.__file__) + os.sep

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
_COUNT = "for counts among n, add up ones: torch.zeros(n).index_add(0, x, torch.ones(len(x)))"
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
# Part of what torch says -> what it means for the author of the model.
_KNOWN = {
    "unsupported format string passed to": _FORMAT,
    "Cannot backprop through mirrored meta": _BACKWARD,
    "has been modified by an inplace operation": _CHANGED,
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
    given = given_where(error, model)
    return TraceError(f"{type(model).__name__} could not be captured as one graph: {where}{at}\n{reason}{given}")


def explain_call(
    error: BaseException, model: torch.nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> TraceError | None:
    """A :class:`TraceError` for a call that ``forward`` does not take; None if ``error`` is about something else."""
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
    except ValueError:  # Nothing is known of what forward takes.
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
    known = [reason for part, reason in _KNOWN.items() if part in str(error)]
    return known[0] if known else f"{type(error).__name__}: {error}"


def _operator_of(error: BaseException) -> str:
    operator = _operator(error)
    return f"{operator}: " if operator else ""


def _name_of(error: BaseException) -> str:
    operator = _operator(error)
    return str(operator.overloadpacket.__name__) if operator else ""


def _operator(error: BaseException) -> torch._ops.OpOverload | None:
    found = getattr(error, "func", error.args[0] if error.args else None)
    return found if isinstance(found, torch._ops.OpOverload) else None


def user_location(error: BaseException) -> tuple[str, str] | None:
    """``("file:line", source line)`` of the innermost frame that is the author's of the model."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename, f.name)]
    return (f"{own[-1].filename}:{own[-1].lineno}", own[-1].line or "") if own else None


def is_users(filename: str, function: str) -> bool:
    """Whether a frame is the author's of a model: neither torch's, nor ours, nor the standard library's, nor one that
    only handles a call of torch made elsewhere."""
    return function not in _HANDLERS and not filename.startswith((*_OWN, "<")) and not _is_standard(filename)


def defined_at(model: torch.nn.Module, path: str) -> str:
    """The module at ``path`` and where its forward is written, for what torch knows no line of."""
    kind = type(model.get_submodule(path))
    try:
        at = f", whose forward is at {inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind.forward)[1]}"
    except (OSError, TypeError):  # Written at a prompt.
        at = ""
    return f"in module {path!r} ({kind.__name__}){at}"


def _is_standard(filename: str) -> bool:
    return filename.startswith(_STANDARD) and "site-packages" not in filename
