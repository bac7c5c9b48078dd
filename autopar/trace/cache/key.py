"""A hash of everything that a trace depends on: the model, the call, the code, and the settings of torch.

:mod:`autopar.content.objects` hashes the model. In addition, the text of every loaded module of the user is hashed,
whether or not the model seems to use it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from autopar.content.code_origin import is_library
from autopar.content.feed import Unkeyable
from autopar.content.objects import Contents
from autopar.content.source_hash import code_version
from autopar.runtime.calls.module_hooks import hooks_everywhere
from autopar.torch_internals.modes import is_any_mode_active
from autopar.trace.capture import Request


def trace_key(request: Request) -> str:
    """The key of a trace. Raises :class:`Unkeyable` if something that it may depend on cannot be hashed."""
    if is_any_mode_active():
        raise Unkeyable("a mode of torch is active, which may do anything")
    for hook in hooks_everywhere():
        raise Unkeyable(f"{hook.text} may do anything")
    contents = Contents()
    contents.add(code_version(), *_settings(request.device))
    for name, text in _user_modules():
        contents.add(name, text)
    contents.add(request.training, request.grad, request.differentiate, request.autocast)
    _add_call(contents, request)
    contents.feed(request.model, "model")
    contents.feed(request.loss_fn, "loss_fn")
    return contents.hexdigest()


def _add_call(contents: Contents, request: Request) -> None:
    contents.add(str(request.call.spec), *request.call.names)
    symbols = {(length.input, length.dim): length.symbol for length in request.lengths}
    for index, (name, leaf) in enumerate(zip(request.call.names, request.call.leaves, strict=True)):
        if isinstance(leaf, torch.Tensor):
            shape = tuple(symbols.get((str(name), dim), size) for dim, size in enumerate(leaf.shape))
            contents.add(shape, leaf.dtype, leaf.requires_grad, isinstance(leaf, nn.Parameter))
        else:
            contents.feed(leaf, f"input {index}")


def _settings(device: torch.device) -> Iterator[object]:
    """Settings of torch that decide which operations run."""
    yield torch.get_default_dtype()
    yield torch.are_deterministic_algorithms_enabled()
    yield torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    yield torch.backends.mha.get_fastpath_enabled()
    yield torch.backends.mkldnn.enabled
    # Which attention is traced; its kernels for a GPU are chosen later.
    yield torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()


def _user_modules() -> Iterator[tuple[str, str]]:
    for name, module in sorted(sys.modules.items()):
        file = str(getattr(module, "__file__", None) or "")
        if file and not is_library(file):
            try:
                yield name, hashlib.sha256(Path(file).read_bytes()).hexdigest()
            except OSError:
                yield name, "unread"
