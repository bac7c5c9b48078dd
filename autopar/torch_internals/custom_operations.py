"""Operations that were registered from Python, and the functions that implement them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# The operations of ``torch.library.custom_op``, by name (2.11).
from torch._library.custom_ops import OPDEFS

_REGISTERED = "debug: registered at "


@dataclass(frozen=True)
class Definition:
    """The parts of an operation of ``torch.library.custom_op``, from which another process can register it again;
    ``kernels`` by type of device."""

    name: str
    schema: str
    tags: Any
    function: Callable[..., Any]
    kernels: dict[str | None, Callable[..., Any]]
    fake: Callable[..., Any] | None
    backward: Callable[..., Any] | None
    setup_context: Callable[..., Any] | None

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """All functions that its author wrote."""
        functions = [self.function, self.fake, self.backward, self.setup_context, *self.kernels.values()]
        return [f for f in functions if f is not None]

    def register(self) -> None:
        """Registers the operation in this process. Relies on ``torch._C.parse_schema`` (2.11)."""
        arguments = torch._C.parse_schema(self.name + self.schema).arguments
        written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        operation = torch.library.custom_op(
            self.name, self.function, mutates_args=written, schema=self.schema, tags=self.tags
        )
        for device, kernel in self.kernels.items():
            if device is not None and kernel is not self.function:
                operation.register_kernel(device)(kernel)
        if self.fake is not None:
            operation.register_fake(self.fake)
        if self.backward is not None:
            operation.register_autograd(self.backward, setup_context=self.setup_context)


def names_defined() -> list[str]:
    """All operations defined from Python, torch's own too, as ``prims::cos``. Relies on ``torch.library._defs``
    (2.11)."""
    return sorted(torch.library._defs)


def definition_of(name: str) -> Definition | None:
    """The operation, if ``torch.library.custom_op`` made it. Relies on the fields of ``CustomOpDef`` (2.11)."""
    operation = OPDEFS.get(name)
    if operation is None:
        return None
    return Definition(
        name,
        operation._schema,
        operation._tags,
        operation._init_fn,
        _kernels(operation),
        operation._abstract_fn,
        operation._backward_fn,
        operation._setup_context_fn,
    )


def _kernels(operation: Any) -> dict[str | None, Callable[..., Any]]:
    """The functions passed to ``register_kernel``. Relies on the wrapper naming them ``fn`` (2.11)."""
    kernels: dict[str | None, Callable[..., Any]] = {}
    for device, wrapped in operation._backend_fns.items():
        inner = inspect.unwrap(wrapped)
        closure = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=False))
        if "fn" in closure:
            kernels[device] = closure["fn"].cell_contents
    return kernels


@cache
def file_that_defined(name: str) -> str:
    """The file in which ``torch.library.Library`` defined the operation; empty for torch's own files. Relies on
    ``torch._C._dispatch_dump`` (2.11)."""
    try:
        lines = torch._C._dispatch_dump(name).splitlines()
    except RuntimeError:  # Some of torch's own names do not parse: they hold spaces.
        return ""
    registered = next((line for line in lines if line.startswith(_REGISTERED)), "")
    file = registered.removeprefix(_REGISTERED).rpartition(":")[0]
    return "" if "/torch/" in file else file
