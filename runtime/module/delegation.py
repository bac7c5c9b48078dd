"""Delegates attributes, methods, conversions and pickling of a parallel module to the original.

Plain attributes and properties are those of the original. So are its methods, but their parameters are DTensors: if a
method does not support these, the error says to call it on whole parameters. ``generate`` and ``save_pretrained`` of
Hugging Face models gather parameters themselves.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime.faults.watch import Watch
from autopar.runtime.state.parameters import broadcast_first
from autopar.runtime.state.weights import Weights
from autopar.torch_internals.state_versions import with_versions

from .full_params import is_first, whole_parameters

# Words by which torch's errors about DTensors are recognised, in addition to where they are raised.
_WORDS = ("DTensor", "invalid python storage", "sharding strategy")
_TENSOR_FILES = "torch/distributed/tensor/"
# What DistributedDataParallel reads of a module first, and nothing else does.
_READ_BY_DDP = "_ddp_params_and_buffers_to_ignore"
_NO_COPIES = (
    "DistributedDataParallel of a parallel model: it is distributed already, and its gradients are those of the global "
    "batch, so use it as it is. For Hugging Face's Trainer take autopar.integrations.transformers.AutoparTrainer, and "
    "for Accelerate AutoparAccelerator; both are given the plain model"
)


class Delegating(nn.Module):
    """The part of :class:`~autopar.runtime.ParallelModule` described above."""

    _original: nn.Module
    _weights: Weights
    _is_whole: bool
    _watch: Watch

    @property
    def module(self) -> nn.Module:
        """The original, whose parameters are DTensors outside :meth:`full_params`."""
        return self._original

    @contextmanager
    def full_params(self, *, rank0_only: bool = False, writeback: bool = False) -> Iterator[nn.Module]:
        """Gives the original module whole plain parameters on every rank while the context is open, for inference and
        saving: ``with model.full_params() as whole: whole.generate(...)``. ``model(...)`` then runs the original on
        this rank alone. Every rank needs memory for the whole model; with ``rank0_only`` only the first rank does, and
        the others have meta tensors. Changes are lost, unless ``writeback``: then the first rank's values are kept.
        Collective over the mesh, at both ends."""
        if self._is_whole:
            if writeback:
                raise AutoparError("full_params(writeback=True) inside full_params(): ask for it at the outer one")
            yield self._original
            return
        with ExitStack() as opened:
            with self._watch.call("model.full_params()"):
                opened.enter_context(whole_parameters(self._weights, rank0_only=rank0_only, writeback=writeback))
            self.__dict__["_is_whole"] = True
            try:
                yield self._original
            finally:
                self.__dict__["_is_whole"] = False

    def _check_parallel(self) -> None:
        if self._is_whole:
            raise AutoparError(
                "inside full_params() there is no step: each rank has the whole model. End the block first, or call "
                "model(...) for the original on this rank"
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original")
            if original is None:
                raise
            if name == _READ_BY_DDP and not hasattr(original, name):
                raise AutoparError(_NO_COPIES) from None
            attribute = getattr(original, name)
        if self._is_whole or not inspect.ismethod(attribute) or attribute.__self__ is not original:
            return attribute
        own = _OWN.get(name)
        return _guarded(name, attribute) if own is None else functools.wraps(attribute)(functools.partial(own, self))

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets attributes that this module does not define on the original, whose forward reads them."""
        super().__setattr__(name, value) if self._is_own(name) else setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name) if self._is_own(name) else delattr(self._original, name)

    def _is_own(self, name: str) -> bool:
        original = self.__dict__.get("_original")
        if original is None or name in self.__dict__:
            return True
        return name.startswith("__") or (hasattr(type(self), name) and name not in vars(original))

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """:meth:`torch.nn.Module.apply` on the original with whole parameters, so that ``fn`` may initialise them; the
        first rank's values are kept. Collective over the mesh."""
        if any(parameter.is_meta for parameter in self.parameters()):
            self._original.apply(fn)
        else:
            with self.full_params(writeback=not self._is_whole):
                self._original.apply(fn)
        self.training = self._original.training
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """``to``, ``half``, ``cuda`` and similar: allowed only if they change nothing."""
        here = self._weights.groups.device
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            converted = fn(torch.empty(0, dtype=tensor.dtype, device=here))
            same_device = (converted.device.type, converted.device.index or 0) == (here.type, here.index or 0)
            if converted.dtype != tensor.dtype or not same_device:
                raise AutoparError(
                    f"a parallel model stays in its dtypes on its devices, but {name} ({tensor.dtype} on {here}) would "
                    f"be {converted.dtype} on {converted.device}. Convert the model before autopar.parallelize, or "
                    "train in 16 bits with Options(precision='bf16')"
                )
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As :meth:`torch.nn.Module.load_state_dict`; also accepts whole plain tensors for distributed parameters."""
        return super().load_state_dict(with_versions(self.own_values(state_dict), state_dict), strict, assign)

    def own_values(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """``state_dict`` with DTensors, placed as the parameters are, for whole plain tensors."""
        own = dict(self.named_parameters(remove_duplicate=False))
        self._weights.take_buffers(state_dict)
        return {
            key: self._weights.whole_to_own(key, value)
            if isinstance(own.get(key), DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            else value
            for key, value in state_dict.items()
        }

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Has no effect; for loops written for DistributedDataParallel. Gradients accumulate over calls with or without
        it, to the same numbers, and are reduced either way, since a sharded gradient cannot store an unreduced one."""
        yield

    def share_memory(self) -> NoReturn:
        raise AutoparError("parameters of a parallel model are shared by its ranks already; share_memory() is refused")

    def to_empty(self, *, device: Any, recurse: bool = True) -> NoReturn:
        raise AutoparError(
            "to_empty() would drop the values of a parallel model. A meta model needs none of it: its first batch "
            "initialises it, or load_state_dict"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise AutoparError(
            "a parallel model holds process groups and compiled programs, which cannot be pickled. Save its state: "
            "autopar.checkpoint.save(folder, model, optimizer, step=...); inside `with model.full_params():` "
            "model.state_dict() has whole plain tensors for torch.save"
        )


def _guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` of the original, with errors about DTensors explained."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except AutoparError:
            raise
        except Exception as error:
            if not _is_about_dtensors(error):
                raise
            raise AutoparError(
                f"{name}() of the original module runs as it is, and met parameters that are spread over the ranks "
                f"(DTensors): {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}. Call it so "
                "on every rank: "
                f"`with model.full_params(): model.module.{name}(...)`, for what needs no gradients. To train through "
                "it, have forward call it"
            ) from error

    return call


def _is_about_dtensors(error: BaseException) -> bool:
    if any(word in str(error) for word in _WORDS):
        return True
    traceback = error.__traceback__
    while traceback is not None:
        if _TENSOR_FILES in traceback.tb_frame.f_code.co_filename:
            return True
        traceback = traceback.tb_next
    return False


def _generate(model: Delegating, *args: Any, **kwargs: Any) -> Any:
    with model.full_params() as original:
        return original.generate(*args, **kwargs)  # type: ignore[operator]


def _save_pretrained(model: Delegating, *args: Any, **kwargs: Any) -> Any:
    """Saves on the first rank; all ranks return when it is done or has failed."""
    groups, result, failure = model._weights.groups, None, None
    with model.full_params(rank0_only=True) as original:
        if is_first(groups):
            try:
                result = original.save_pretrained(*args, **kwargs)  # type: ignore[operator]
            except Exception as error:
                failure = error
    failed = next(broadcast_first([torch.tensor(failure is not None, device="cpu")], groups))[1]
    if failure is not None:
        raise failure
    if failed:
        raise AutoparError("save_pretrained failed on the first rank, whose error says why")
    return result


def _resize(_model: Delegating, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise AutoparError(
        "resize_token_embeddings() changes parameters that are placed already: call it before parallelize"
    )


# Methods that differ from the original's: most gather whole parameters first.
_OWN: dict[str, Callable[..., Any]] = {
    "generate": _generate,
    "save_pretrained": _save_pretrained,
    "resize_token_embeddings": _resize,
}
