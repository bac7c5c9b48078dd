"""The microbatches of a step, for one process that computes them one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.pipeline_program import PipelineProgram
from autopar.runtime.calls.signature import CompiledCall
from autopar.torch_internals.trees import tree_flatten, tree_unflatten

# The place of an input that every microbatch takes whole: no dim. Chosen: None is no leaf of every tree.
_WHOLE = -1


@dataclass(frozen=True)
class Pieces:
    """``count`` microbatches that are batches of their own. ``dims``: the positional and the keyword inputs, with the
    dim along which each tensor is divided in its place, -1 for what each microbatch takes whole."""

    count: int
    dims: tuple[Any, Any]

    @staticmethod
    def of(call: CompiledCall, program: PipelineProgram) -> Pieces:
        """Those of a compiled step."""
        signature = call.signature
        dims = (None if name is None else program.inputs.get(name) for name in signature.input_names)
        args, kwargs = tree_unflatten([_WHOLE if dim is None else dim for dim in dims], signature.input_spec)
        return Pieces(program.microbatches, (args, dict(kwargs)))

    def divide(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The inputs of each microbatch."""
        ordered = {name: kwargs[name] for name in self.dims[1]}

        def piece(leaf: Any, dim: int, index: int) -> Any:
            return leaf.chunk(self.count, dim)[index] if isinstance(leaf, torch.Tensor) and dim != _WHOLE else leaf

        leaves, spec = tree_flatten((tuple(args), ordered))
        dims, _ = tree_flatten((tuple(self.dims[0]), self.dims[1]))
        for index in range(self.count):
            yield tree_unflatten([piece(leaf, dim, index) for leaf, dim in zip(leaves, dims, strict=True)], spec)
