"""Initialises a model on the meta device, one tensor at a time.

The model's own initialisation (``reset_parameters`` of every module, children first, then Hugging Face's
``initialize_weights``) runs once on the meta tensors, at no cost, and every operation on them is recorded. To compute a
tensor's values, only the operations that it depends on are replayed on a real device, so that at most one whole tensor
is in memory. Each random operation is seeded by its position in the record, so values depend only on the seed and the
model, not on the mesh, nor on which tensors a rank computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.torch_internals.hugging_face import initialises_all_inside
from autopar.torch_internals.modes import TorchDispatchMode
from autopar.torch_internals.modules import SKIPPED_ON_META, buffers_of, initialiser_of
from autopar.torch_internals.operators import is_mutable, schema_of
from autopar.torch_internals.tensors import storage_key
from autopar.torch_internals.trees import tree_leaves, tree_map

# In-place operations that do not read the tensor they overwrite.
_OVERWRITES = {
    "normal_",
    "uniform_",
    "zero_",
    "fill_",
    "copy_",
    "random_",
    "exponential_",
    "bernoulli_",
    "eye_",
}


@dataclass(frozen=True)
class _Meta:
    """Represents a meta tensor in the record: a view of the storage ``storage``."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    whole: bool


@dataclass(frozen=True)
class _Step:
    """One recorded operation, at position ``index``, with the storages that it ``reads`` and ``writes``. ``fills``: it
    does not read what it writes; ``overwrites``: it also writes whole storages."""

    index: int
    function: Any
    args: Any
    kwargs: Any
    outputs: tuple[_Meta, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    fills: bool
    overwrites: bool


def _storage(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _is_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _note(value: Any) -> Any:
    """``value`` in the form of the record: meta tensors by their storage, real ones by their current values."""
    if not isinstance(value, torch.Tensor):
        return value
    if not _is_meta(value):
        return value.detach().clone()
    whole = value.untyped_storage().nbytes() == value.numel() * value.dtype.itemsize
    return _Meta(_storage(value), tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype, whole)


class _Recorder(TorchDispatchMode):
    """Records operations on meta tensors. Keeps their storages alive, since addresses identify them, but not the
    tensors: a view would keep its base alive, which then could not be swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.kept: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if _is_meta(leaf)]
        results = [leaf for leaf in tree_leaves(result) if _is_meta(leaf)]
        if operands or results:
            self.kept.update((_storage(tensor), tensor.untyped_storage()) for tensor in operands + results)
            self._record(func, args, kwargs, operands, results)
        return result

    def _record(
        self, func: Any, args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        reads = frozenset(map(_storage, operands))
        mutable = is_mutable(func)
        if mutable:
            writes = frozenset(_storage(t) for t in _mutated(func, args, kwargs) if _is_meta(t))
        else:
            writes = frozenset(map(_storage, results)) - reads
        if not writes:
            return
        fills = not mutable or schema_of(func).name.split("::")[1] in _OVERWRITES
        new = [tensor for tensor in results if _storage(tensor) not in reads]
        self.add(func, args, kwargs, new, reads, writes, fills, fills and (not mutable or _note(args[0]).whole))

    def add(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        results: list[torch.Tensor],
        reads: frozenset[int],
        writes: frozenset[int],
        fills: bool,
        overwrites: bool,
    ) -> None:
        """Appends a step, with the current values of real tensors."""
        noted_args, noted_kwargs = tree_map(_note, (args, kwargs))
        outputs = tuple(map(_note, results))
        index = len(self.steps)
        self.steps.append(
            _Step(
                index=index,
                function=function,
                args=noted_args,
                kwargs=noted_kwargs,
                outputs=outputs,
                reads=reads,
                writes=writes,
                fills=fills,
                overwrites=overwrites,
            )
        )

    def add_whole(self, function: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
        """Records ``function(tensor, ...)`` of :data:`SKIPPED_ON_META`. Raises :class:`AutoparError` for a real
        tensor."""
        if not _is_meta(tensor):
            raise AutoparError(f"{function.__name__} of a real tensor inside the initialisation of a meta model")
        self.kept[_storage(tensor)] = tensor.untyped_storage()
        storage = frozenset([_storage(tensor)])
        self.add(function, (tensor, *args), kwargs, [], storage, storage, True, _note(tensor).whole)
        return tensor

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Records all operations on meta tensors while the context is open, including those that torch.nn.init skips.

        The functions of torch.nn.init are referred to by many names (transformers keeps them in a table), so their code
        is replaced, not the names.
        """
        functions = [getattr(nn.init, name) for name in SKIPPED_ON_META]
        originals = [(f.__code__, f.__defaults__, f.__kwdefaults__) for f in functions]
        nn.init.__dict__["_autopar_recorder"] = self
        try:
            for name, function in zip(SKIPPED_ON_META, functions, strict=True):
                function.__defaults__ = function.__kwdefaults__ = None
                function.__code__ = _relay(name)
            with self:
                yield
        finally:
            del nn.init.__dict__["_autopar_recorder"]
            for function, (code, defaults, keywords) in zip(functions, originals, strict=True):
                function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, keywords


def _relay(name: str) -> CodeType:
    """The code of a function in ``torch.nn.init`` that passes its call to the recorder."""
    source = (
        f"def {name}(tensor, *args, **kwargs):\n    return _autopar_recorder.add_whole({name}, tensor, args, kwargs)\n"
    )
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    code: CodeType = namespace[name].__code__
    return code


def _mutated(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensor arguments that ``func`` writes to."""
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _initialise(module: nn.Module) -> None:
    """Runs the model's own initialisation, children first."""
    for path, part in reversed(list(module.named_modules())):
        if (reset := initialiser_of(part)) is not None:
            try:
                reset()
            except Exception as error:
                raise AutoparError(
                    f"the module {path or 'itself'!r} ({type(part).__name__}) cannot be initialised "
                    "on the meta device: "
                    f"{type(error).__name__}: {error}; build it on the CPU instead"
                ) from error
    covered: set[nn.Module] = set()
    for part in module.modules():
        if part not in covered and initialises_all_inside(part):
            covered.update(part.modules())
            part.initialize_weights()  # type: ignore[operator]


@contextmanager
def _own_random_state(device: torch.device) -> Iterator[None]:
    devices = [] if device.type in ("cpu", "meta") else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield


class Initialiser:
    """Computes the initial values of the meta tensors of ``module``; see the module docstring. ``seed``: determines the
    random ones.

    Raises :class:`AutoparError` for a module whose initialisation does not run on the meta device.
    """

    def __init__(self, module: nn.Module, device: torch.device, seed: int) -> None:
        self.device = device
        self.seed = seed
        self._recorder = _Recorder()
        with _own_random_state(torch.device("cpu")), torch.no_grad():
            torch.manual_seed(seed)
            with self._recorder.listening():
                _initialise(module)

    def value(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The whole values of the meta ``tensor`` called ``name``, on the device. Raises :class:`AutoparError` if
        nothing initialises it."""
        target = _note(tensor)
        steps = self._needed(target.storage)
        if not steps:
            raise AutoparError(
                f"{name} is on the meta device and nothing initialises it: give its module a "
                "reset_parameters() that "
                "fills it in place, or build the model on the CPU"
            )
        first = next(step for step in steps if target.storage in step.writes)
        if not first.fills:
            raise AutoparError(
                f"{name} is changed by {first.function} before anything fills it: some of its "
                "initialisation does nothing on "
                "the meta device; build the model on the CPU"
            )
        storages: dict[int, torch.UntypedStorage] = {}
        with _own_random_state(self.device), torch.no_grad():
            for step in steps:
                self._replay(step, storages)
        return self._real(target, storages).contiguous()

    def _needed(self, storage: int) -> list[_Step]:
        """The steps that the final content of ``storage`` depends on, in order."""
        needed, steps = {storage}, []
        for step in reversed(self._recorder.steps):
            hit = step.writes & needed
            if hit:
                steps.append(step)
                if step.overwrites:
                    needed -= hit
                needed |= step.reads - (step.writes if step.overwrites else frozenset())
        return steps[::-1]

    def _replay(self, step: _Step, storages: dict[int, torch.UntypedStorage]) -> None:
        digest = hashlib.sha256(f"{self.seed}:{step.index}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)

        def leaf(value: Any) -> Any:
            if isinstance(value, _Meta):
                return self._real(value, storages)
            if isinstance(value, torch.device) and value.type == "meta":
                return self.device
            return value.to(self.device) if isinstance(value, torch.Tensor) and value.dim() else value

        args, kwargs = tree_map(leaf, (step.args, step.kwargs), is_leaf=lambda v: isinstance(v, _Meta))
        result = step.function(*args, **kwargs)
        results = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        if step.outputs:
            for noted, value in zip(step.outputs, results, strict=True):
                storages[noted.storage] = value.untyped_storage()

    def _real(self, noted: _Meta, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        """The real tensor of a recorded meta tensor; a new storage is uninitialised, as with ``torch.empty``."""
        if noted.storage not in storages:
            extent = noted.offset + 1 + sum((n - 1) * s for n, s in zip(noted.shape, noted.stride, strict=True))
            size = max(extent, 0) * noted.dtype.itemsize
            storages[noted.storage] = torch.UntypedStorage(size, device=self.device)
        storage = storages[noted.storage]
        last = noted.offset + 1 + sum((n - 1) * s for n, s in zip(noted.shape, noted.stride, strict=True))
        if last * noted.dtype.itemsize > storage.nbytes():
            storage.resize_(last * noted.dtype.itemsize)
        empty = torch.empty(0, dtype=noted.dtype, device=self.device)
        return empty.set_(storage, noted.offset, noted.shape, noted.stride)


def materialise(module: nn.Module, device: torch.device, seed: int) -> None:
    """Initialises every meta parameter and buffer of ``module`` in place, whole on ``device``, with the values of a
    parallel module for the same ``seed``."""
    initialiser = Initialiser(module, device, seed)
    for name, parameter in list(module.named_parameters()):
        if _is_meta(parameter):
            real = nn.Parameter(initialiser.value(parameter, name), parameter.requires_grad)
            real.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, real)
    for path, part in module.named_modules():
        for key, buffer in buffers_of(part).items():
            if buffer is not None and _is_meta(buffer):
                buffers_of(part)[key] = initialiser.value(buffer, f"{path}.{key}" if path else key)
