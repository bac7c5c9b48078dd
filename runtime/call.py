"""One compiled program bound to a module's tensors: inputs go in as the user has them, outputs come out as
the model gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from autopar.errors import AutoparError, PlanMismatchError
from autopar.program import TensorSlot
from autopar.spec import PARTIAL_SUM, REPLICATE, local_shape, take_local

from .collectives import Collectives, Handle
from .compiled import Compiled
from .executor import Executable
from .groups import MeshGroups
from .parameters import gather_whole, make_dtensor, torch_placements
from .weights import Weights


def flatten_as(spec: TreeSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The leaves of a call in the order of ``spec``, whatever the order of its keywords. Raises
    :class:`PlanMismatchError` if the call has another structure."""
    leaves, found = tree_flatten((args, dict(kwargs)))
    if found == spec:
        return leaves
    order = spec.child(1).context
    if set(order) == set(kwargs):
        leaves, found = tree_flatten((args, {key: kwargs[key] for key in order}))
    if found != spec:
        raise PlanMismatchError(f"the call has the structure\n  {found}\nbut was traced with\n  {spec}")
    return leaves


def same_value(old: object, new: object) -> bool:
    """Whether a non-tensor input is as it was; values that cannot be compared are the same only if
    identical."""
    if old is new:
        return True
    try:
        return type(old) is type(new) and bool(old == new)
    except Exception:
        return False


def is_replicated(slot: TensorSlot) -> bool:
    """Whether every rank has all of it."""
    return all(placement == REPLICATE for placement in slot.placements)


class Call:
    """See the module docstring. Making one is collective (process groups, first placement of the
    parameters). ``draw_state`` gives what a run's random numbers are a function of, and counts the run."""

    def __init__(
        self, compiled: Compiled, weights: Weights, groups: MeshGroups, draw_state: Callable[[], torch.Tensor]
    ) -> None:
        self.program, self.signature = compiled.program, compiled.signature
        self.groups, self.weights, self._draw_state = groups, weights, draw_state
        self.executable = Executable(self.program, groups.mesh)
        weights.settle(self.program)
        self.parameters = weights.parameters(self.program)
        self._parameter_index = {slot.target: i for i, slot in enumerate(self.program.parameters)}
        self._leaf_index = {name: i for i, name in enumerate(self.signature.input_names) if name is not None}
        self._partial = Collectives(groups).partial
        self.results = {slot.target: slot for slot in self.program.results if slot.kind == "output"}
        self.input_gradients = {s.target: s for s in self.program.gradients if s.kind == "input_gradient"}

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The inputs, flat. Raises :class:`PlanMismatchError` if a non-tensor input is not what was
        traced."""
        leaves = flatten_as(self.signature.input_spec, args, kwargs)
        for index, value in self.signature.constants.items():
            if self.signature.input_names[index] is None and not same_value(value, leaves[index]):
                raise PlanMismatchError(
                    f"the non-tensor input {self.leaf_name(index)} was {value!r} when the model was "
                    "traced and is now "
                    f"{leaves[index]!r}; its value is part of the compiled program: pass the same, or "
                    "make it a tensor"
                )
        return leaves

    def leaf_name(self, index: int) -> str:
        """Where leaf ``index`` of the inputs stands in the call, such as ``kwargs['use_cache']``."""
        paths = tree_unflatten(list(range(len(self.signature.input_names))), self.signature.input_spec)
        for head, part in zip(("args", "kwargs"), paths, strict=True):
            for path, found in torch.utils._pytree.tree_flatten_with_path(part)[0]:
                if found == index:
                    return f"{head}{torch.utils._pytree.keystr(path)}"
        return str(index)

    def own_input(self, slot: TensorSlot, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of an input: a global tensor, or a DTensor as it lies or redistributed."""
        if tuple(value.shape) != slot.shape:
            raise PlanMismatchError(
                f"the input {slot.target} has shape {list(value.shape)}, but the program was compiled "
                f"for {list(slot.shape)}"
            )
        if isinstance(value, DTensor) and value.device_mesh != self.groups.mesh:
            value = value.full_tensor()
        if isinstance(value, DTensor):
            wanted = torch_placements(slot.placements, self.groups.shape)
            return (value if tuple(value.placements) == wanted else value.redistribute(placements=wanted)).to_local()
        here = take_local(value.detach(), slot.placements, self.groups.shape, self.groups.coordinate)
        return here.to(self.groups.device, non_blocking=True).contiguous()

    def run(self, leaves: Sequence[Any]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Forward: local outputs by name, and the values saved for backward. Buffers are brought up to
        date."""
        outputs, saved = self.start(leaves)
        return {name: settled(value) for name, value in outputs.items()}, saved

    def start(self, leaves: Sequence[Any]) -> tuple[dict[str, torch.Tensor | Handle], list[torch.Tensor]]:
        """:meth:`run`, but outputs may be on their way still (:func:`settled` waits for one)."""
        with torch.no_grad():
            working = self.weights.working(self.executable, self.parameters)
            module = self.weights.module
            results, saved = self.executable.forward(
                [self._bind(s, leaves, working, module) for s in self.program.placeholders]
            )
            outputs: dict[str, torch.Tensor | Handle] = {}
            for slot, value in zip(self.program.results, results, strict=True):
                if slot.kind == "mutation":
                    module.get_buffer(slot.target).copy_(gather_whole(value, slot, self.groups))
                else:
                    outputs[slot.target] = value
        return outputs, saved

    def _bind(
        self, slot: TensorSlot, leaves: Sequence[Any], working: list[torch.Tensor], module: nn.Module
    ) -> torch.Tensor:
        match slot.kind:
            case "param":
                return working[self._parameter_index[slot.target]]
            case "input":
                return self.own_input(slot, leaves[self._leaf_index[slot.target]])
            case "buffer":
                buffer = module.get_buffer(slot.target)
                # The program's saved values may be views of its inputs; a buffer is overwritten in place.
                mine = take_local(buffer, slot.placements, self.groups.shape, self.groups.coordinate)
                return mine.clone() if self._is_mutated(slot.target) else mine
            case "constant":
                return self.executable.constants[slot.target]
            case "random":
                return self._draw_state()
        raise PlanMismatchError(
            f"the program takes a placeholder of kind {slot.kind!r} ({slot.target}) that a call has not"
        )

    def _is_mutated(self, buffer: str) -> bool:
        return any(slot.kind == "mutation" and slot.target == buffer for slot in self.program.results)

    def present(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Output ``name`` as the user sees it: plain if replicated, else a DTensor."""
        slot = self.results[name]
        return local.detach() if is_replicated(slot) else make_dtensor(local, slot, self.groups)

    def rebuild(self, values: Mapping[str, torch.Tensor]) -> Any:
        """The model's own return value from presented outputs by name."""
        signature = self.signature
        leaves = [
            signature.output_constants.get(index) if name is None else values[name]
            for index, name in enumerate(signature.output_names)
        ]
        return tree_unflatten(leaves, signature.output_spec)

    def own_tangent(self, slot: TensorSlot, gradient: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """This rank's part of the gradient of an output: zeros if none arrived."""
        if gradient is None:
            shape = local_shape(slot.shape, slot.placements, self.groups.shape, self.groups.coordinate)
            return torch.zeros(shape, dtype=dtype, device=self.groups.device)
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        own = take_local(gradient, slot.placements, self.groups.shape, self.groups.coordinate)
        axes = tuple(a for a, p in enumerate(slot.placements) if p == PARTIAL_SUM)
        return (self._partial(own, axes) if axes else own).contiguous()

    def tangents(
        self, gradients: Mapping[str, torch.Tensor | None], dtypes: Mapping[str, torch.dtype]
    ) -> list[torch.Tensor]:
        """One local tangent per entry of ``program.tangents``. Raises :class:`AutoparError` if a gradient
        arrived for an output that has none."""
        known = {slot.target for slot in self.program.tangents}
        for name, gradient in gradients.items():
            if gradient is not None and name not in known:
                raise AutoparError(
                    f"a gradient arrived at output {self.output_name(name)}, but the program "
                    "differentiates only "
                    f"{', '.join(map(self.output_name, sorted(known))) or 'nothing'}: compute the "
                    "loss from that, or pass "
                    "labels so that the model returns its loss"
                )
        return [self.own_tangent(s, gradients.get(s.target), dtypes[s.target]) for s in self.program.tangents]

    def unit_tangent(self, name: str) -> torch.Tensor:
        """Ones like output ``name``: the gradient of an output with respect to itself."""
        slot = next(slot for slot in self.program.tangents if slot.target == name)
        return torch.ones(slot.shape, dtype=slot.dtype, device=self.groups.device)

    def output_name(self, name: str) -> str:
        """Where output ``name`` stands in the model's return value, such as ``['loss']``."""
        index = self.signature.output_names.index(name)
        tree = tree_unflatten(list(range(len(self.signature.output_names))), self.signature.output_spec)
        for path, found in torch.utils._pytree.tree_flatten_with_path(tree)[0]:
            if found == index:
                return torch.utils._pytree.keystr(path) or name
        return name

    def backward(self, saved: list[torch.Tensor], tangents: list[torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        """Local gradients by (kind, name); those that are None are absent."""
        values = self.executable.backward(saved, tangents)
        pairs = zip(self.program.gradients, values, strict=True)
        return {(slot.kind, slot.target): value for slot, value in pairs if value is not None}


def settled(value: torch.Tensor | Handle) -> torch.Tensor:
    """An output of a program, once it has arrived."""
    found = value.wait() if isinstance(value, Handle) else value
    assert isinstance(found, torch.Tensor)
    return found
