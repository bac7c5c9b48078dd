"""The calling convention of a compiled model: flattens the user's inputs to leaves, and rebuilds the model's return
value."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autopar.errors import AutoparError, PlanMismatchError
from autopar.ir.program import Section
from autopar.runtime.comm.exchange import Exchange
from autopar.runtime.comm.groups import MeshGroups
from autopar.runtime.execute.bad_indices import raise_bad_indices
from autopar.runtime.execute.compiled_pieces import Compilation
from autopar.runtime.execute.index_guards import looks_up
from autopar.runtime.faults.watch import Watch
from autopar.runtime.state.loss_scale import LossScale
from autopar.runtime.state.weights import Weights
from autopar.torch_internals.hugging_face import CACHE_NAMES
from autopar.torch_internals.trees import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from .compiled import Compiled
from .kind import leaf_names
from .resident import resident_of


def flatten_as(spec: TreeSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The leaves of a call in the order of ``spec``, whatever the order of its keywords. Raises
    :class:`PlanMismatchError` if the call has another structure."""
    leaves, structure = tree_flatten((args, dict(kwargs)))
    if structure == spec:
        return leaves
    order = spec.child(1).context
    if set(order) == set(kwargs):
        leaves, structure = tree_flatten((args, {key: kwargs[key] for key in order}))
    if structure != spec:
        raise PlanMismatchError(f"the call has the structure\n  {structure}\nbut was traced with\n  {spec}")
    return leaves


def same_value(old: object, new: object) -> bool:
    """Whether a non-tensor input is unchanged; values that cannot be compared are the same only if identical."""
    if old is new:
        return True
    try:
        return type(old) is type(new) and bool(old == new)
    except Exception:
        return False


def _is_empty(leaf: object) -> bool:
    """Whether a tensor has no values."""
    return getattr(leaf, "is_meta", False) and resident_of(leaf) is None


class CompiledCall:
    """The base of compiled calls; see the module docstring. Creating one is collective (process groups, first placement
    of the parameters).

    ``draw_state``: returns the state that a run's random numbers are a function of, and counts the run; ``loss_scale``:
    the scale of the loss under fp16, else None; ``compilation``: given if sections are compiled.
    """

    def __init__(
        self,
        compiled: Compiled,
        weights: Weights,
        groups: MeshGroups,
        draw_state: Callable[[], torch.Tensor],
        loss_scale: LossScale | None = None,
        compilation: Compilation | None = None,
    ) -> None:
        self.signature, self.padding, self.caches = compiled.signature, compiled.padding, compiled.caches
        self.weights, self.groups = weights, groups
        self.loss_scale, self.compilation = loss_scale, compilation
        self._exchange: Exchange | None = None
        self.watch: Watch | None = None
        self._draw_state = draw_state
        self._leaf_index = {name: i for i, name in enumerate(self.signature.input_names) if name is not None}
        self._bind_program(compiled.program)

    def _bind_program(self, program: Any) -> None:
        """Prepares ``program`` to be run; subclasses differ in the kind of program."""
        raise NotImplementedError

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The flat inputs. Raises :class:`PlanMismatchError` if a non-tensor input differs from the trace, or a tensor
        has no values."""
        leaves = flatten_as(self.signature.input_spec, args, kwargs)
        if any(_is_empty(leaves[index]) for index in self._leaf_index.values()):
            empty = [name for index, name in self._given_names().items() if _is_empty(leaves[index])]
            raise PlanMismatchError(
                f"on the meta device, without values to run with: the input {' and the input '.join(empty)}. Pass real "
                "tensors. To plan alone, autopar.plan(...) and parallelize(example_inputs=...) take such a batch"
            )
        for index, value in self.signature.constants.items():
            if self.signature.input_names[index] is None and not same_value(value, leaves[index]):
                raise PlanMismatchError(
                    f"the non-tensor input {self.leaf_name(index)} was {value!r} when the model was "
                    "traced and is now "
                    f"{leaves[index]!r}; its value is part of the compiled program: pass the same, or "
                    "make it a tensor"
                )
        return leaves

    def sections(self) -> Iterator[Section]:
        """All sections that this rank runs."""
        raise NotImplementedError

    def watch_indices(self, exchange: Exchange) -> None:
        """From now on indices out of range are reported to every rank, if the program has look-ups on CPUs. Collective:
        with pipeline stages only some ranks may have look-ups."""
        own = self.groups.device.type == "cpu" and looks_up(self.sections())
        self._exchange = exchange if any(exchange.all_objects(own)) else None

    def check_indices(self, leaves: Sequence[Any]) -> None:
        """Raises :class:`IndexRangeError`, on every rank, if on any of them indices were out of range in the call of
        these ``leaves`` that has just run. Collective."""
        if self._exchange is not None:
            raise_bad_indices(self._exchange, lambda: {n: leaves[index] for index, n in self._given_names().items()})

    def _given_names(self) -> dict[int, str]:
        """The user's names of the tensors of :meth:`leaves`, by their index."""
        numbers = list(range(len(self.signature.input_names)))
        args, kwargs = tree_unflatten(numbers, self.signature.input_spec)
        names = leaf_names(self.weights.module, args, kwargs)
        ordered = tree_flatten((args, dict(sorted(kwargs.items()))))[0]
        given = dict(zip(ordered, names, strict=True))
        return {index: given[index] for index in self._leaf_index.values()}

    def leaf_name(self, index: int) -> str:
        """The position of leaf ``index`` of the inputs in the call, such as ``kwargs['use_cache']``."""
        paths = tree_unflatten(list(range(len(self.signature.input_names))), self.signature.input_spec)
        for head, part in zip(("args", "kwargs"), paths, strict=True):
            for path, leaf_index in tree_flatten_with_path(part)[0]:
                if leaf_index == index:
                    return f"{head}{keystr(path)}"
        return str(index)

    def rebuild(self, values: Mapping[str, torch.Tensor]) -> Any:
        """The model's own return value from presented outputs by name."""
        signature = self.signature
        leaves = [
            signature.output_constants.get(index) if name is None else values[name]
            for index, name in enumerate(signature.output_names)
        ]
        return tree_unflatten(leaves, signature.output_spec)

    def warn_of_lost(self, told: set[str]) -> None:
        """Warns, unless ``told`` of them, of outputs that no compiled call returns, such as a key-value cache."""
        lost = [f"{name} ({kind})" for name, kind in self.signature.lost.items() if name not in told]
        if not lost:
            return
        told.update(self.signature.lost)
        here, them = ("it is", "it") if len(lost) == 1 else ("they are", "them")
        cache = any(name.rpartition(".")[2] in CACHE_NAMES for name in self.signature.lost)
        unneeded = " Pass use_cache=False if it is not needed." if cache else ""
        generates = "; model.generate(...) does so by itself" if cache else ""
        warnings.warn(
            f"the model returns {', '.join(lost)}, but a compiled call returns tensors and constants only: {here} None."
            f"{unneeded} To have {them}, call the model on whole parameters, on every rank: `with model.full_params(): "
            f"model(...)`{generates}",
            stacklevel=2,
        )

    def output_name(self, name: str) -> str:
        """The position of output ``name`` in the model's return value, such as ``['loss']``."""
        if name not in self.signature.output_names:
            return name
        index = self.signature.output_names.index(name)
        tree = tree_unflatten(list(range(len(self.signature.output_names))), self.signature.output_spec)
        for path, leaf_index in tree_flatten_with_path(tree)[0]:
            if leaf_index == index:
                return keystr(path) or name
        return name

    def loss_name(self) -> str:
        """The output that ``step`` differentiates. Raises :class:`AutoparError` if the model returns no loss."""
        if self.signature.loss is None:
            raise AutoparError(
                "step() differentiates the loss that the model returns, but this call returns none: pass the labels "
                "that the model computes it from, or give parallelize a loss_fn, called as loss_fn(output), "
                "loss_fn(output, batch) or, in step(..., targets=...), loss_fn(output, targets); without pipeline "
                "stages and microbatches you can also run out = model(...), compute a loss from out and call "
                "loss.backward()"
            )
        return self.signature.loss
