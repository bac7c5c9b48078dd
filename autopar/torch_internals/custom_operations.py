"""Operations that were registered from Python, and the functions behind them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# What ``torch.library.custom_op`` made, by name (2.11).
from torch._library.custom_ops import OPDEFS

_REGISTERED = "debug: registered at "


@dataclass(frozen=True)
class Definition:
    """An operation of ``torch.library.custom_op`` as its parts, from which another process makes it again; ``kernels``
    by type of device."""

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
        """All that its author wrote."""
        given = [self.function, self.fake, self.backward, self.setup_context, *self.kernels.values()]
        return [f for f in given if f is not None]

    def register(self) -> None:
        """Defines it here. Relies on ``torch._C.parse_schema`` (2.11)."""
        arguments = torch._C.parse_schema(self.name + self.schema).arguments
        written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        made = torch.library.custom_op(
            self.name, self.function, mutates_args=written, schema=self.schema, tags=self.tags
        )
        for device, kernel in self.kernels.items():
            if device is not None and kernel is not self.function:
                made.register_kernel(device)(kernel)
        if self.fake is not None:
            made.register_fake(self.fake)
        if self.backward is not None:
            made.register_autograd(self.backward, setup_context=self.setup_context)


def names_defined() -> list[str]:
    """All operations defined from Python, torch's own too, as ``prims::cos``. Relies on ``torch.library._defs``
    (2.11)."""
    return sorted(torch.library._defs)


def definition_of(name: str) -> Definition | None:
    """The operation, if ``torch.library.custom_op`` made it. Relies on the fields of ``CustomOpDef`` (2.11)."""
    made = OPDEFS.get(name)
    if made is None:
        return None
    return Definition(
        name,
        made._schema,
        made._tags,
        made._init_fn,
        _kernels(made),
        made._abstract_fn,
        made._backward_fn,
        made._setup_context_fn,
    )


def _kernels(made: Any) -> dict[str | None, Callable[..., Any]]:
    """The functions that were given to ``register_kernel``. Relies on the wrapper naming them ``fn`` (2.11)."""
    found: dict[str | None, Callable[..., Any]] = {}
    for device, wrapped in made._backend_fns.items():
        inner = inspect.unwrap(wrapped)
        held = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=False))
        if "fn" in held:
            found[device] = held["fn"].cell_contents
    return found


@cache
def file_that_defined(name: str) -> str:
    """The file in which ``torch.library.Library`` defined the operation; empty for torch's own files. Relies on
    ``torch._C._dispatch_dump`` (2.11)."""
    try:
        lines = torch._C._dispatch_dump(name).splitlines()
    except RuntimeError:  # Some of torch's own names do not parse: they hold spaces.
        return ""
    said = next((line for line in lines if line.startswith(_REGISTERED)), "")
    file = said.removeprefix(_REGISTERED).rpartition(":")[0]
    return "" if "/torch/" in file else file
