"""Batch norm in training, where a device has the whole batch: torch's kernel, with three passes over the activations
instead of one for each operation. Under mixed precision it takes 16 bits and gives 16 bits, and the casts around it,
which are passes too, are gone."""

from __future__ import annotations

import math

from autopar.ir.node import Arg, TensorType, Value
from autopar.ir.placements import REPLICATE, Placements, shard, shard_dim

from .pattern import Pattern
from .site import Replacement, Rewrite, Site

# What is normalised is called %wide: the input, or its cast.
_STATISTICS = """
  %sum = aten.sum.dim_IntList(%wide, "?dims", True)
  %mean = aten.div.Tensor(%sum, "?count")
  %centred = aten.sub.Tensor(%wide, %mean)
  %squares = aten.mul.Tensor(%centred, %centred)
  %spread = aten.sum.dim_IntList(%squares, "?dims", True)
  %variance = aten.div.Tensor(%spread, "?count")
  %shifted = aten.add.Tensor(%variance, "?eps")
  %scale = aten.rsqrt.default(%shifted)
  %normal = aten.mul.Tensor(%centred, %scale)
"""
_TRACKING = """
  %mean_row = aten.reshape.default(%mean, "?row")
  %mean_part = aten.mul.Tensor(%mean_row, "?momentum")
  %mean_rest = aten.mul.Tensor(%running_mean, "?remainder")
  %new_mean = aten.add.Tensor(%mean_part, %mean_rest)
  %variance_row = aten.reshape.default(%variance, "?row")
  %unbiased = aten.mul.Tensor(%variance_row, "?correction")
  %variance_part = aten.mul.Tensor(%unbiased, "?momentum")
  %variance_rest = aten.mul.Tensor(%running_variance, "?remainder")
  %new_variance = aten.add.Tensor(%variance_part, %variance_rest)
"""
# A batch without further dims needs no column of weights.
_AFFINE = """
  %weight_column = aten.reshape.default(%weight, "?column")
  %weighted = aten.mul.Tensor(%normal, %weight_column)
  %bias_column = aten.reshape.default(%bias, "?column")
  %result = aten.add.Tensor(%weighted, %bias_column)
"""
_AFFINE_ROWS = """
  %weighted = aten.mul.Tensor(%normal, %weight)
  %result = aten.add.Tensor(%weighted, %bias)
"""
# Of an input in 16 bits, which autocast leaves as it is: statistics, weights and averages are float32.
WIDEN = "\n  %{wide} = aten._to_copy.default(%{narrow}, dtype=torch.float32)\n"
NARROW = "\n  %{narrow} = aten._to_copy.default(%{wide}, dtype=torch.{dtype})\n"
DTYPES = (None, "bfloat16", "float16")
# What others may use too: it is then computed as before, from torch's statistics.
_KEPT = frozenset(("wide", "centred", "weight_column", "bias_column", "mean_row"))


def _pattern(affine: str, tracking: bool, dtype: str | None) -> Pattern:
    """``dtype``: of 16 bits, or None for an input without casts."""
    rows = [*(("weight", "bias") if affine else ()), *(("running_mean", "running_variance") if tracking else ())]
    result = "result" if affine else "normal"
    body = _STATISTICS + _TRACKING * tracking + affine
    if dtype:
        body = WIDEN.format(wide="wide", narrow="x") + body + NARROW.format(narrow="narrow", wide=result, dtype=dtype)
    given = ["x" if dtype else "wide", *rows]
    results = ["narrow" if dtype else result, "mean", "scale", *(("new_mean", "new_variance") if tracking else ())]
    inputs, outputs = (", ".join(f"%{name}" for name in each) for each in (given, results))
    return Pattern.from_text(f"batch_norm({inputs}):{body}  return {outputs}")


def kernel_input(site: Site) -> Value:
    """What the kernel of a match takes first: what it normalises, or its gradient."""
    return site[site.pattern.section.inputs[0]]


def kernel_result(site: Site) -> str:
    """The pattern's name of what the kernel of a match gives."""
    value = site.pattern.section.outputs[0]
    assert value is not None
    return value.node


def row_placements(column: Placements) -> Placements:
    """The placements of a row of channels, from those of a column [1, channels, 1, ...]."""
    return tuple(REPLICATE if shard_dim(place) is None else shard(0) for place in column)


def _is_batch_norm(site: Site) -> bool:
    """Whether the numbers are those of a batch norm: of all dims but the second, over their whole length, and averages
    that weigh old and new together as one."""
    shape, argument = site.shape("wide"), site.match.arguments
    others = [dim for dim in range(len(shape)) if dim != 1]
    count = math.prod(shape[dim] for dim in others)
    if len(shape) < 2 or list(argument["dims"]) != others or argument["count"] != count:
        return False
    rows = site.pattern.section.inputs[1:]
    # A column of weights may match as the weights, if its reshape is placed otherwise than the rest.
    if any(tuple(site.shape(name)) != (shape[1],) for name in rows):
        return False
    if len({site.type(name).dtype for name in ("wide", *rows)}) > 1:
        return False
    if site.graph.type_of(kernel_input(site)).dtype != site.type(kernel_result(site)).dtype:
        return False  # The kernel gives what it takes; a cast of integers, or to another dtype, is an operation.
    if "momentum" not in argument:
        return True
    weighs = math.isclose(argument["momentum"] + argument["remainder"], 1.0)
    return weighs and count > 1 and math.isclose(argument["correction"], count / (count - 1), rel_tol=1e-9)


def build(site: Site) -> Replacement | None:
    """The kernel, and its statistics in the shape in which others use them."""
    if not _is_batch_norm(site):
        return None
    given, result = site.pattern.section.inputs, kernel_result(site)
    kept = ("new_mean", "new_variance") if "running_mean" in given else ()
    row = row_placements(site.home(site["mean"]))
    statistics = TensorType((site.shape("wide")[1],), site.type("mean").dtype)
    types = (site.type(result), statistics, statistics, *map(site.type, kept))
    places = (site.home(site[result]), row, row, *(site.home(site[name]) for name in kept))
    node, strategy = site.make(site.node(result), *_call(site), types, places)
    nodes, strategies = [node], {node.name: strategy}
    for index, name in ((1, "mean"), (2, "scale")):
        value, shape = Value(node.name, index), site.shape(name)
        column, reshaping = site.make(
            site.node(name),
            "aten.reshape.default",
            (value, shape),
            (site.type(name),),
            (site.home(site[name]),),
            {value: row},
        )
        nodes.append(column)
        strategies[column.name] = reshaping
    values = {site[name]: Value(node.name, index) for index, name in ((0, result), *enumerate(kept, 3))}
    return Replacement(tuple(nodes), strategies, values)


def _call(site: Site) -> tuple[str, tuple[Arg, ...]]:
    given, x, eps = site.pattern.section.inputs, kernel_input(site), site.argument("eps")
    weights = (site["weight"], site["bias"]) if "weight" in given else (None, None)
    if "running_mean" not in given:
        return "aten._native_batch_norm_legit.no_stats", (x, *weights, True, 0.0, eps)
    averages = (site["running_mean"], site["running_variance"])
    args = (x, *weights, *averages, True, site.argument("momentum"), eps)
    return "aten._native_batch_norm_legit_functional.default", args


# The largest first: those without averages or casts would match a part of those with.
REWRITES = tuple(
    Rewrite(_pattern(affine, tracking, dtype), build, _KEPT)
    for dtype in reversed(DTYPES)
    for tracking in (True, False)
    for affine in (_AFFINE, _AFFINE_ROWS, "")
)
