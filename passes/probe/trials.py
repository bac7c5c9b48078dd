"""Trials: run a call on random tensors of chosen sizes, whole and in shards, and compare the results.

Values have *profiles* and *scales*, to detect rules that hold for small numbers only (a function that is linear near
zero, a threshold on a sum). Integers stay within the range that the operation accepts; bools are sometimes all equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from autopar.ir.node import Arg, TensorType, map_arg
from autopar.ir.placements import REPLICATE, Placement, chunk_bounds, shard_dim
from autopar.passes.rule_language.registry import OpCall, Operand

Tensors = tuple[torch.Tensor | None, ...]
Shape = tuple[int, ...]
# Roundings (eps) by which two results may differ. Chosen: above sums of the few elements of a trial.
ROUNDING = 256
REDUCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda parts: parts.sum(0, dtype=parts.dtype),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}


@dataclass(frozen=True, slots=True)
class Values:
    """How values are generated: ``profile`` is ``signed`` (normal), ``positive``, ``spread`` (over eight decades) or
    ``zeros`` (half of them are 0), all times ``scale``; ``wide``: in float64."""

    seed: int
    profile: str = "signed"
    scale: float = 1.0
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Range:
    """The integers ``low <= i < high`` that an operand accepts; ``of``: the dim ``(operand, dim)`` whose size ``high``
    is, if any."""

    low: int = 0
    high: int = 2
    of: tuple[int, int] | None = None

    def above(self, shapes: Sequence[Shape]) -> int:
        """The bound for operands of these shapes."""
        return self.high if self.of is None else shapes[self.of[0]][self.of[1]]


def is_float(dtype: torch.dtype) -> bool:
    """Whether arithmetic in that dtype rounds."""
    return dtype.is_floating_point or dtype.is_complex


def make_operands(
    types: Sequence[TensorType], shapes: Sequence[Shape], ranges: Mapping[int, Range], values: Values
) -> list[torch.Tensor]:
    """One random tensor for each operand."""
    generator = torch.Generator().manual_seed(values.seed)
    operands = []
    for index, (kind, shape) in enumerate(zip(types, shapes, strict=True)):
        if is_float(kind.dtype):
            operands.append(_floats(shape, kind.dtype, values, generator))
        elif kind.dtype == torch.bool:
            share = (0.5, 0.5, 0.5, 1.0, 0.0)[values.seed % 5]
            operands.append(torch.rand(shape, generator=generator) < share)
        else:
            accepted = ranges.get(index, Range())
            operands.append(_integers(shape, accepted.low, accepted.above(shapes), generator).to(kind.dtype))
    return operands


def _floats(shape: Shape, dtype: torch.dtype, values: Values, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_complex:
        parts = [_floats(shape, torch.float64, values, generator) for _ in range(2)]
        return torch.complex(*parts).to(torch.complex128 if values.wide else dtype)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    unscaled = {
        "signed": lambda: normal,
        "positive": lambda: uniform + 0.1,
        "spread": lambda: normal.sign() * 10 ** (8 * uniform - 4),
        "zeros": lambda: normal * (uniform < 0.5),
    }[values.profile]()
    return (unscaled * values.scale).to(torch.float64 if values.wide else dtype)


def _integers(shape: Shape, low: int, high: int, generator: torch.Generator) -> torch.Tensor:
    """Random integers over the whole range, including both of its ends."""
    integers = torch.randint(low, max(high, low + 1), shape, generator=generator)
    if integers.numel() > 1:
        places = torch.randperm(integers.numel(), generator=generator)[:2]
        integers.view(-1)[places] = torch.tensor([low, max(high - 1, low)])
    return integers


def find_operation(op: str) -> Callable[..., Any] | None:
    """The torch operation called ``op`` (``aten.mm.default``), or None if there is none."""
    namespace, *path = op.split(".")
    if len(path) != 2 or not hasattr(torch.ops, namespace):
        return None
    packet = getattr(getattr(torch.ops, namespace), path[0], None)
    return getattr(packet, path[1], None)


def execute(call: OpCall, operation: Callable[..., Any], operands: Sequence[torch.Tensor]) -> Tensors:
    """The results of the call on these operands."""
    device = operands[0].device if operands else torch.device("cpu")

    def leaf(arg: Arg) -> Any:
        if isinstance(arg, Operand):
            return operands[arg.index]
        return device if isinstance(arg, torch.device) else arg

    args = [map_arg(arg, leaf) for arg in call.args]
    result = operation(*args, **{key: map_arg(arg, leaf) for key, arg in call.kwargs})
    results = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(r if isinstance(r, torch.Tensor) else None for r in results)


def split(x: torch.Tensor, placement: Placement, devices: int, generator: torch.Generator) -> list[torch.Tensor]:
    """The local parts of ``x`` on each device; a Partial is split at random, into parts of its own magnitude. Raises
    ValueError if ``x`` cannot be split so."""
    if isinstance(placement, Replicate):
        # Cloned, since the operation may write into its operands.
        return [x.clone() for _ in range(devices)]
    dim = shard_dim(placement)
    if dim is not None:
        return [x.narrow(dim, *chunk_bounds(x.shape[dim], devices, i)).clone() for i in range(devices)]
    if not isinstance(placement, Partial) or not x.dtype.is_floating_point:
        raise ValueError(f"{x.dtype} does not split as {placement}")
    size = x.abs().amax() if x.numel() else x.new_ones(())
    noise = torch.rand((devices, *x.shape), generator=generator, dtype=torch.float64).to(x.dtype) * size
    if placement.reduce_op in ("max", "min"):
        owner = torch.randint(0, devices, x.shape, generator=generator)
        behind = x - noise if placement.reduce_op == "max" else x + noise
        return [torch.where(owner == i, x, behind[i]) for i in range(devices)]
    return list((noise - noise.mean(0) + x / devices).unbind())


def joins(
    pieces: Sequence[torch.Tensor | None], whole: torch.Tensor | None, placement: Placement, rounding: float
) -> bool:
    """Whether the results of all devices with ``placement`` reassemble ``whole`` up to ``rounding``."""
    if whole is None or any(piece is None for piece in pieces):
        return whole is None and all(piece is None for piece in pieces) and placement == REPLICATE
    tensors: list[torch.Tensor] = [piece for piece in pieces if piece is not None]
    dim = shard_dim(placement)
    if dim is not None:
        if whole.dim() <= dim or any(piece.dim() != whole.dim() for piece in tensors):
            return False
        lengths = [chunk_bounds(whole.shape[dim], len(tensors), i)[1] for i in range(len(tensors))]
        sizes = [piece.shape[dim] for piece in tensors]
        others = {(*p.shape[:dim], *p.shape[dim + 1 :]) for p in tensors}
        return sizes == lengths and len(others) == 1 and agree(torch.cat(tensors, dim), whole, rounding)
    if any(piece.shape != whole.shape for piece in tensors):
        return False
    if isinstance(placement, Replicate):
        return all(agree(piece, whole, rounding) for piece in tensors)
    assert isinstance(placement, Partial)
    if whole.dtype == torch.bool or (whole.dtype.is_complex and placement.reduce_op != "sum"):
        return False
    stacked = torch.stack(tensors)
    return agree(REDUCTIONS[placement.reduce_op](stacked), whole, rounding, _largest(stacked))


def _largest(x: torch.Tensor) -> float:
    finite = x[torch.isfinite(x)].abs() if is_float(x.dtype) else x.abs()
    return float(finite.max()) if finite.numel() else 0.0


def agree(actual: torch.Tensor, expected: torch.Tensor, rounding: float, size: float = 0.0) -> bool:
    """Whether two tensors are equal, or for floats within ``rounding`` times the largest finite number in ``expected``
    (at least ``size``). Where ``expected`` overflows, ``actual`` must too."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not is_float(expected.dtype):
        return torch.equal(actual, expected)
    finite = torch.isfinite(expected)
    if bool(torch.isfinite(actual[~finite]).any()):
        return False
    off = (actual[finite] - expected[finite]).abs()
    return not off.numel() or float(off.max()) <= rounding * max(_largest(expected), size)


def rounding_of(tensors: Sequence[torch.Tensor | None]) -> float:
    """The relative rounding of a few operations in the coarsest float dtype among the tensors."""
    return max((ROUNDING * torch.finfo(t.dtype).eps for t in tensors if t is not None and is_float(t.dtype)), default=0)


def is_informative(results: Tensors) -> bool:
    """Whether the results contain a finite number to compare."""
    return any(r is not None and r.numel() and bool(torch.isfinite(r).any()) for r in results)


def candidates(result: TensorType | None) -> list[Placement]:
    """The placements that a result may have, the most specific first."""
    if result is None:
        return [REPLICATE]
    partial: list[Placement] = [Partial(op) for op in REDUCTIONS]
    return [REPLICATE, *(Shard(dim) for dim in range(result.rank)), *partial]


def leaves_none_out(shapes: Sequence[Shape], placements: Sequence[Placement], devices: int) -> bool:
    """Whether every device gets elements of each operand."""
    pairs = [(shape, shard_dim(p)) for shape, p in zip(shapes, placements, strict=True)]
    return all(dim is None or chunk_bounds(shape[dim], devices, devices - 1)[1] > 0 for shape, dim in pairs)


def are_even(shapes: Sequence[Shape | None], placements: Sequence[Placement], devices: int) -> bool:
    """Whether every sharded dim divides evenly."""
    pairs = [(shape, shard_dim(p)) for shape, p in zip(shapes, placements, strict=True)]
    return all(shape is None or dim is None or shape[dim] % devices == 0 for shape, dim in pairs)


def cuts_differ(shapes: Sequence[Shape], placements: Sequence[Placement]) -> bool:
    """Whether the sharded dims of the operands have different lengths."""
    lengths = [shape[d] for shape, p in zip(shapes, placements, strict=True) if (d := shard_dim(p)) is not None]
    return any(a != b for a, b in pairwise(lengths))
