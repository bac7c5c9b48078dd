"""One compiled program bound to a module's tensors: takes the user's inputs and returns the model's outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, PlanMismatchError
from autopar.ir.placements import PARTIAL_SUM, REPLICATE, local_shape, take_local
from autopar.ir.program import Program, Section, TensorSlot
from autopar.ops.index_range import take_out_of_range
from autopar.progress import shown
from autopar.runtime.comm.collectives import Collectives, Handle
from autopar.runtime.execute.convolution_layout import as_traced
from autopar.runtime.execute.executor import Executable
from autopar.runtime.inputs.rank_local import own_part
from autopar.runtime.state.parameters import gather_whole, local_of, make_dtensor, torch_placements
from autopar.runtime.state.weights import accumulate
from autopar.runtime.torch_internals.tensor_lists import copy_each

from .resident import cache_slots, keep_piece, own_piece
from .signature import CompiledCall


def is_replicated(slot: TensorSlot) -> bool:
    """Whether every rank has the whole tensor."""
    return all(placement == REPLICATE for placement in slot.placements)


@dataclass
class Past:
    """What a run read in addition to inputs and parameters, so that it can be repeated: the state of its random
    numbers, and the previous values of the buffers that it changed."""

    state: torch.Tensor | None = None
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


class Call(CompiledCall):
    """See the module docstring."""

    @shown("compiling the program")
    def _bind_program(self, program: Program) -> None:
        self.program = program
        self.executable = Executable(program, self.groups.mesh, self.compilation)
        self.weights.settle([(slot, self.groups) for slot in program.parameters])
        self.parameters = self.weights.parameters(program.parameters)
        self._parameter_index = {slot.target: i for i, slot in enumerate(program.parameters)}
        # Most placeholders are parameters. This runs for each of them at every call.
        indices = self._parameter_index
        self._placeholders = [(s, indices[s.target] if s.kind == "param" else None) for s in program.placeholders]
        self._partial = Collectives(self.groups).partial
        self.results = {slot.target: slot for slot in program.results if slot.kind == "output"}
        self._cut = {(s.kind, s.target) for s in (*program.placeholders, *program.results) if not is_replicated(s)}
        self._cached = cache_slots(program.placeholders)
        changed = (slot.target for slot in program.results if slot.kind == "mutation")
        self._mutated = {target for target in changed if target not in self._cached}
        self._copied = self._mutated - self.executable.buffers.apart
        self._copied_again = self._copied | self.executable.buffers.written
        self._has_buffers = any(slot.kind == "buffer" for slot in program.placeholders) or bool(self._mutated)
        self.input_gradients = {s.target: s for s in program.gradients if s.kind == "input_gradient"}

    def sections(self) -> Iterator[Section]:
        yield from (self.program.refresh, self.program.forward, self.program.backward)

    def own_input(self, slot: TensorSlot, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of an input: of a global tensor, or of a DTensor, which is redistributed if necessary."""
        if tuple(value.shape) != slot.shape:
            raise PlanMismatchError(
                f"the input {slot.target} has shape {list(value.shape)}, but the program was compiled "
                f"for {list(slot.shape)}"
            )
        part = own_part(value, slot.placements, self.groups) if isinstance(value, DTensor) else None
        if part is not None:
            return part.contiguous()
        if isinstance(value, DTensor) and value.device_mesh != self.groups.mesh:
            value = value.full_tensor()
        if isinstance(value, DTensor):
            wanted = torch_placements(slot.placements, self.groups.shape)
            return (value if tuple(value.placements) == wanted else value.redistribute(placements=wanted)).to_local()
        local = take_local(value.detach(), slot.placements, self.groups.shape, self.groups.coordinate)
        return local.to(self.groups.device, non_blocking=True).contiguous()

    def run(
        self, leaves: Sequence[Any], past: Past | None = None
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Runs forward. Returns local outputs by name, and the values saved for backward. Updates buffers, and fills in
        ``past``."""
        started, saved = self.start(leaves, past)
        outputs = {name: wait_for(value) for name, value in started.items()}
        self.check_indices(leaves)
        return outputs, saved

    def saved_again(self, leaves: Sequence[Any], past: Past) -> list[torch.Tensor]:
        """The values that this program saves for backward, for a run of another program with the same inputs. Changes
        neither buffers nor the count of calls."""
        outputs, saved = self.start(leaves, past, again=True)
        for value in outputs.values():
            wait_for(value)  # Unless started collectives are awaited, later ones never finish.
        return saved

    def start(
        self, leaves: Sequence[Any], past: Past | None = None, *, again: bool = False
    ) -> tuple[dict[str, torch.Tensor | Handle], list[torch.Tensor]]:
        """:meth:`run`, but outputs may still be in flight (:func:`wait_for` waits for one). ``again``: repeats the run
        of ``past``."""
        take_out_of_range()  # Clears what an earlier call noted before it failed with another error.
        past = past or Past()
        with torch.no_grad():
            # Recomputed each time, since a DTensor's version counter misses some writes (``.data``, fused optimizers).
            working = self.executable.refresh([local_of(parameter) for parameter in self.parameters])
            buffers = self.weights.walk.named_buffers() if self._has_buffers else {}
            results, saved = self.executable.forward(
                [
                    self._bind(slot, leaves, buffers, past, again) if index is None else working[index]
                    for slot, index in self._placeholders
                ]
            )
            pairs = [*zip(self.program.results, results, strict=True)]
            if self._mutated and not again:
                self._update(buffers, [pair for pair in pairs if pair[0].target in self._mutated])
            if self._cached:
                self._keep_caches(leaves, [pair for pair in pairs if pair[0].target in self._cached])
        return {slot.target: value for slot, value in pairs if slot.kind != "mutation"}, saved

    def _update(self, buffers: Mapping[str, torch.Tensor], pairs: Sequence[tuple[TensorSlot, torch.Tensor]]) -> None:
        """Writes what forward computed for the buffers."""
        pairs = [(slot, value) for slot, value in pairs if value is not buffers[slot.target]]  # Written in place.
        wholes = [
            gather_whole(value, slot, self.groups) if (slot.kind, slot.target) in self._cut else value
            for slot, value in pairs
        ]
        if wholes:
            copy_each([buffers[slot.target] for slot, _ in pairs], wholes)

    def _keep_caches(self, leaves: Sequence[Any], pairs: Sequence[tuple[TensorSlot, torch.Tensor]]) -> None:
        for slot, value in pairs:
            keep_piece(own_piece(self._cached[slot.target], leaves[self._leaf_index[slot.target]]), value)

    def _bind(
        self,
        slot: TensorSlot,
        leaves: Sequence[Any],
        buffers: Mapping[str, torch.Tensor],
        past: Past,
        again: bool,
    ) -> torch.Tensor:
        match slot.kind:
            case "input":
                return self.own_input(slot, leaves[self._leaf_index[slot.target]])
            case "buffer":
                return self._own_buffer(slot, buffers[slot.target], past, again)
            case "cache":
                return own_piece(slot, leaves[self._leaf_index[slot.target]])
            case "constant":
                return self.executable.constants[slot.target]
            case "random":
                if past.state is None or not again:
                    past.state = self._draw_state()
                return past.state
        raise PlanMismatchError(
            f"the program takes a placeholder of kind {slot.kind!r} ({slot.target}), which no call has"
        )

    def _own_buffer(self, slot: TensorSlot, buffer: torch.Tensor, past: Past, again: bool) -> torch.Tensor:
        """This rank's part of the buffer; its value before the run in ``past``, if that is known. What is written in
        place is copied for another run, whose new values nothing uses."""
        if slot.target in past.buffers:
            return past.buffers[slot.target]
        local = buffer
        if (slot.kind, slot.target) in self._cut:
            local = take_local(buffer, slot.placements, self.groups.shape, self.groups.coordinate)
        if slot.target in (self._copied_again if again else self._copied):
            # The program's saved values may be views of its inputs; a buffer is overwritten in place.
            local = past.buffers[slot.target] = local.clone()
        return local

    def present(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Output ``name`` for the user: a plain tensor if replicated, else a DTensor."""
        slot = self.results[name]
        local = local if self.compilation is None else as_traced(local)
        return local.detach() if is_replicated(slot) else make_dtensor(local, slot, self.groups)

    def own_tangent(self, slot: TensorSlot, gradient: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """This rank's part of the gradient of an output; zeros if it has none."""
        if gradient is None:
            shape = local_shape(slot.shape, slot.placements, self.groups.shape, self.groups.coordinate)
            return torch.zeros(shape, dtype=dtype, device=self.groups.device)
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        own = take_local(gradient, slot.placements, self.groups.shape, self.groups.coordinate)
        axes = tuple(a for a, p in enumerate(slot.placements) if p == PARTIAL_SUM)
        return (self._partial(own, axes) if axes else own).contiguous()

    def differentiates(self, names: Iterable[str]) -> bool:
        """Whether the program takes gradients of all these outputs."""
        return {slot.target for slot in self.program.tangents}.issuperset(names)

    def tangents(
        self, gradients: Mapping[str, torch.Tensor | None], dtypes: Mapping[str, torch.dtype]
    ) -> list[torch.Tensor]:
        """One local tangent per entry of ``program.tangents``. Raises :class:`AutoparError` for a gradient of an output
        that the program does not differentiate."""
        differentiated = {slot.target for slot in self.program.tangents}
        for name, gradient in gradients.items():
            if gradient is not None and name not in differentiated:
                raise AutoparError(
                    f"a gradient arrived at output {self.output_name(name)}, but the program "
                    "differentiates only "
                    f"{', '.join(map(self.output_name, sorted(differentiated))) or 'nothing'}: compute the "
                    "loss from that, or pass "
                    "labels so that the model returns its loss"
                )
        return [self.own_tangent(s, gradients.get(s.target), dtypes[s.target]) for s in self.program.tangents]

    def unit_tangent(self, name: str) -> torch.Tensor:
        """Ones of the shape of output ``name``: the gradient of an output with respect to itself."""
        slot = next(slot for slot in self.program.tangents if slot.target == name)
        return torch.ones(slot.shape, dtype=slot.dtype, device=self.groups.device)

    def backward(self, saved: list[torch.Tensor], tangents: list[torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        """Local gradients by (kind, name), without those that are None. If they overflow, or if gradients that they
        would be added to have overflowed, gradients of parameters are left out, and parameters lose those they have."""
        if self.loss_scale is not None:
            tangents = [tangent * self.loss_scale.scale for tangent in tangents]
        values = self.executable.backward(saved, tangents)
        pairs = zip(self.program.gradients, values, strict=True)
        gradients = {(slot.kind, slot.target): value for slot, value in pairs if value is not None}
        everything = self.weights.module.parameters()
        if self.loss_scale is not None and not self.loss_scale.settle(gradients.values(), everything, self.groups):
            return {key: value for key, value in gradients.items() if key[0] != "gradient"}
        return gradients

    def step(self, leaves: Sequence[Any], scale: float = 1.0) -> torch.Tensor:
        """Runs forward and backward of the loss times ``scale``, and adds gradients to ``.grad`` of the parameters.
        Returns the whole loss, detached and unscaled."""
        name = self.loss_name()
        outputs, saved = self.start(leaves)
        tangent = self.unit_tangent(name) * scale
        tangents = self.tangents({name: tangent}, {s.target: tangent.dtype for s in self.program.tangents})
        gradients = self.backward(saved, tangents)
        loss = gather_whole(wait_for(outputs.pop(name)), self.results[name], self.groups).detach()
        self.check_indices(leaves)
        with torch.no_grad():
            for slot, parameter in zip(self.program.parameters, self.parameters, strict=True):
                gradient = gradients.pop(("gradient", slot.target), None)
                if gradient is not None:
                    accumulate(parameter, gradient)
        return loss


def wait_for(value: torch.Tensor | Handle) -> torch.Tensor:
    """Waits for an output of a program, and returns it."""
    tensor = value.wait() if isinstance(value, Handle) else value
    assert isinstance(tensor, torch.Tensor)
    return tensor
