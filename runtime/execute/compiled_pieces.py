"""Pieces of sections compiled by Inductor, when they first run.

Code is specialised to the sizes and strides of a piece's inputs. Equal pieces share it in this process, all ranks and
runs of this machine through Inductor's cache; of several ranks that need the same code at once, one compiles it and
the others wait for it. A piece that cannot be compiled runs as it is, and is reported once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from autopar.content.cache_folder import cache_folder, caching_enabled
from autopar.ir.program import Section
from autopar.ops.masked import LOCAL_OPS
from autopar.ops.random_streams import TRACED_DRAWS
from autopar.runtime.torch_internals.inductor import (
    Compiled,
    Metadata,
    assert_size_stride,
    caching_in,
    compile_function,
    missing_compiler,
)

from .convolution_layout import convolutions
from .index_guards import GUARDED
from .piece_draws import with_streams
from .piece_lookups import LOOKUPS, Lookups, Range
from .pieces import Piece, kind_of, split
from .section_code import Run, SectionCode
from .section_source import Source
from .torch_operations import Operation

# The folder of compiled code in autopar's cache folder.
KIND = "compiled"
# Sizes and strides that a piece is compiled for; with others it runs as it is.
# Chosen: the layers of a model differ in the strides of a few values; not measured.
_MOST_VARIANTS = 8
# Files that ranks lock while they compile; pieces with the same lock only wait for each other.
# Chosen: many more than ranks of a host compile at once.
_LOCKS = 256
# How long a rank waits for another one that compiles the same code, before it does so itself.
# Chosen: several times what a piece takes; the other may have been stopped.
_LOCK_SECONDS = 120.0

_log = logging.getLogger("autopar.compile")
# Inductor is not made for several threads.
_COMPILING = threading.RLock()


@dataclass
class Compilation:
    """Given if a model's sections are compiled: for which device, and what has to be open ``meanwhile``. ``failed``:
    the pieces that could not be compiled, by the cause."""

    device: torch.device
    meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext
    failed: dict[str, list[str]] = field(default_factory=dict)

    @staticmethod
    def on(device: torch.device, meanwhile: Callable[[], AbstractContextManager[None]]) -> Compilation | None:
        """None, with a warning, where nothing can be compiled."""
        why = missing_compiler(device)
        if why is None:
            return Compilation(device, meanwhile)
        warnings.warn(
            f"Options(compile=...): {why}, so the program runs uncompiled; install one, or set compile=False to run "
            "without this warning",
            stacklevel=2,
        )
        return None

    @property
    def problems(self) -> tuple[str, ...]:
        """What could not be compiled, a line for each cause: it mostly is that of many pieces."""
        return tuple(_problem(cause, pieces) for cause, pieces in self.failed.items())

    def noted_in(self, plan: Any) -> Any:
        """``plan`` with a warning for each problem."""
        return replace(plan, warnings=(*plan.warnings, *self.problems)) if self.failed else plan

    def report(self, piece: str, cause: str) -> None:
        """Notes that ``piece`` cannot be compiled. Logs a cause once."""
        pieces = self.failed.setdefault(cause, [])
        if piece not in pieces:
            pieces.append(piece)
            _log.log(logging.WARNING if len(pieces) == 1 else logging.DEBUG, "%s", _problem(cause, [piece]))


def _problem(cause: str, pieces: Sequence[str]) -> str:
    others = len(pieces) - 1
    more = f", and {others} other piece{'s' * (others > 1)}," if others else ""
    return f"{pieces[0]}{more} run uncompiled: {cause}"


@dataclass(frozen=True)
class Variant:
    """Code for inputs of these sizes and strides, and with indices in these ``ranges``."""

    sizes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    ranges: tuple[Range, ...]
    run: Compiled

    def fits(self, inputs: Sequence[torch.Tensor]) -> bool:
        try:
            for value, (size, stride) in zip(inputs, self.sizes, strict=True):
                assert_size_stride(value, size, stride)
        except AssertionError:
            return False
        return True


class PieceCode:
    """The compiled code of a canonical section, by metadata of its inputs."""

    def __init__(self, canonical: Section, device: torch.device) -> None:
        self._canonical, self._device = canonical, device
        self._variants: dict[tuple[Metadata, ...], Variant | Exception] = {}

    def variant(self, inputs: Sequence[torch.Tensor]) -> Variant | Exception:
        """The code for such inputs, or why there is none."""
        key = tuple((tuple(x.shape), x.stride(), x.dtype, x.device) for x in inputs)
        with _COMPILING:
            if key not in self._variants:
                self._variants[key] = self._compiled(key)
            return self._variants[key]

    def _compiled(self, key: tuple[Metadata, ...]) -> Variant | Exception:
        if len(self._variants) >= _MOST_VARIANTS:
            return RuntimeError(f"it is compiled for {_MOST_VARIANTS} sizes of inputs already")
        lookups = Lookups(self._canonical, _checked_lookups(self._device))
        operations = {**LOCAL_OPS, **TRACED_DRAWS, **lookups.operations, **convolutions(self._device)}
        function = SectionCode(
            self._canonical, Source(self._canonical, operations, self._device, reuse=False), ""
        ).function
        try:
            with _alone(f"{self._canonical}{key}"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Advice of Inductor, which is nobody's to follow.
                run = compile_function(function, key)
        except Exception as error:
            return error
        return Variant(tuple((size, stride) for size, stride, _, _ in key), tuple(lookups.ranges), run)


# The code of this process.
_CODE: WeakValueDictionary[tuple[str, torch.device], PieceCode] = WeakValueDictionary()


def code_of(canonical: Section, device: torch.device) -> PieceCode:
    """The code of a canonical section, shared in this process."""
    key = (str(canonical), device)
    code = _CODE.get(key)
    if code is None:
        code = _CODE[key] = PieceCode(canonical, device)
    return code


class PieceCall:
    """Runs ``piece``, from a list of inputs, which it empties, to the list of its outputs: compiled, or ``as_it_is``
    where that fails, which is reported."""

    def __init__(
        self, piece: Piece, device: torch.device, as_it_is: Callable[[Section], Run], compilation: Compilation
    ) -> None:
        self._code, self._section = code_of(piece.canonical, device), piece.section
        self._make_as_it_is, self._compilation = as_it_is, compilation
        self._as_it_is: Run | None = None
        self._variants: list[Variant] = []

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[Any]:
        for variant in self._variants:
            if variant.fits(inputs):
                return self._checked(variant, inputs)
        with self._compilation.meanwhile():
            found = self._code.variant(inputs)
        if isinstance(found, Variant):
            self._variants.append(found)
            return self._checked(found, inputs)
        outputs = self._uncompiled(inputs)  # First, since an error of an operation is not one of compiling it.
        self._report(found)
        return outputs

    def _checked(self, variant: Variant, inputs: list[torch.Tensor]) -> Sequence[Any]:
        for each in variant.ranges:
            if not each.holds_for(inputs):
                return self._uncompiled(inputs)
        return variant.run(inputs)

    def _uncompiled(self, inputs: list[torch.Tensor]) -> list[Any]:
        if self._as_it_is is None:
            self._as_it_is = self._make_as_it_is(self._section)
        return self._as_it_is(inputs)

    def _report(self, why: Exception) -> None:
        first = self._section.instructions[0]
        lines = str(why).strip().splitlines()
        self._compilation.report(
            f"{len(self._section.instructions)} operations from {first.op}"
            f"{first.module and f' of module {first.module}'} on",
            f"{type(why).__name__}: {lines[0] if lines else ''}",
        )


@contextmanager
def _alone(key: str) -> Iterator[None]:
    """Inductor's cache is autopar's, and no other process of this machine compiles the same code meanwhile."""
    if not caching_enabled():
        yield
        return
    folder, lock = cache_folder() / KIND, int(hashlib.sha256(key.encode()).hexdigest(), 16) % _LOCKS
    try:
        (folder / "locks").mkdir(parents=True, exist_ok=True)
        private = _is_private(folder)
    except OSError:  # A folder that cannot be written to: Inductor has one of its own.
        private = False
    if not private:
        yield
        return
    with caching_in(folder), _locked(folder / "locks" / str(lock)):
        yield


def _is_private(folder: Path) -> bool:
    """Whether only this user can put code into ``folder``: what Inductor finds there, it runs."""
    if not hasattr(os, "getuid"):
        return True
    for each in (folder, folder.parent):
        found = each.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for others that hold the lock, at most :data:`_LOCK_SECONDS`. Without locks each rank compiles."""
    try:
        import fcntl

        file = path.open("w")
    except (ImportError, OSError):
        yield
        return
    with file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # A network file system without locks.
                break
        yield


def _checked_lookups(device: torch.device) -> frozenset[str]:
    """The look-ups whose indices are checked before a piece runs: on a GPU those among shards, which give zeros for an
    index that no rank has. Inductor's code for others asserts on GPUs, as torch's does."""
    return LOOKUPS if device.type == "cpu" else frozenset(op for op in LOOKUPS if op.startswith("autopar."))


def with_pieces(
    section: Section,
    operations: Mapping[str, Operation],
    as_it_is: Callable[[Section], Run],
    compilation: Compilation,
) -> tuple[Section, dict[str, Operation]]:
    """``section`` in compiled pieces, and the operations that it then calls."""
    host = {*GUARDED, *_checked_lookups(compilation.device)} & set(operations)
    pieces = split(with_streams(section), lambda instruction: kind_of(instruction, host))
    calls = {name: PieceCall(piece, compilation.device, as_it_is, compilation) for name, piece in pieces.pieces.items()}
    return pieces.section, {**operations, **calls}
