"""The gradient of batch norm in training, where torch's kernel runs in forward (:mod:`.batch_norm`). It takes the input
itself, so that is what forward saves, instead of its distance from the mean."""

from __future__ import annotations

import math

from autopar.ir.node import Arg, TensorType, Value
from autopar.ir.placements import Placements

from .batch_norm import DTYPES, NARROW, WIDEN, kernel_input, kernel_result, row_placements
from .pattern import Pattern
from .site import Replacement, Rewrite, Site

_BODY = """
  %bias_gradient = aten.sum.dim_IntList(%wide_gradient, "?dims")
  %products = aten.mul.Tensor(%wide_gradient, %centred)
  %projection = aten.sum.dim_IntList(%products, "?dims")
  %share = aten.mul.Tensor(%bias_gradient, "?inverse_count")
  %share_column = aten.reshape.default(%share, "?column")
  %part = aten.mul.Tensor(%projection, "?inverse_count")
  %scale_square = aten.mul.Tensor(%scale_row, %scale_row)
  %part_scale = aten.mul.Tensor(%part, %scale_square)
  %part_column = aten.reshape.default(%part_scale, "?column")
"""
_AFFINE = """
  %factor = aten.mul.Tensor(%scale_row, %weight)
  %factor_column = aten.reshape.default(%factor, "?column")
"""
_END = """
  %projected = aten.mul.Tensor(%centred, %part_column)
  %difference = aten.sub.Tensor(%wide_gradient, %projected)
  %rest = aten.sub.Tensor(%difference, %share_column)
  %input_gradient = aten.mul.Tensor(%rest, FACTOR)
"""
_WEIGHT_GRADIENT = """
  %weight_gradient = aten.mul.Tensor(%projection, %scale_row)
"""
# Two batch norms with one gradient, as before the sum of a residual block, share the sum of it.
_KEPT = frozenset(("wide_gradient", "share", "share_column"))


def _pattern(affine: bool, trained: bool, dtype: str | None) -> Pattern:
    """``dtype``: of 16 bits, or None for gradients without casts."""
    given = f"%{'gradient' if dtype else 'wide_gradient'}, %centred, %scale_row, " + ("%weight" if affine else "%scale")
    results = f"%{'narrow' if dtype else 'input_gradient'}, %bias_gradient" + ", %weight_gradient" * trained
    end = _END.replace("FACTOR", "%factor_column" if affine else "%scale")
    body = _BODY + _AFFINE * affine + _WEIGHT_GRADIENT * trained + end
    if dtype:
        begin = WIDEN.format(wide="wide_gradient", narrow="gradient")
        body = begin + body + NARROW.format(narrow="narrow", wide="input_gradient", dtype=dtype)
    return Pattern.from_text(f"batch_norm_backward({given}):{body}  return {results}")


def _forward(site: Site) -> Site | None:
    """The batch norm whose gradient this is, if its kernel runs in forward and the numbers are the same."""
    forward = site.earlier.get(site["centred"])
    if forward is None or forward.pattern.section.name != "batch_norm":
        return None
    if list(site.argument("dims")) != list(forward.argument("dims")):
        return None
    row = site.graph[site["scale_row"].node]
    of_scale = row.op == "aten.reshape.default" and site.occurrences.base(row.operands[0]) == forward["scale"]
    if "scale" in site.pattern.section.inputs:
        of_scale &= site["scale"] == forward["scale"]
    inverse = math.isclose(site.argument("inverse_count") * forward.argument("count"), 1.0, rel_tol=1e-9)
    given, own = (s["weight"] if "weight" in s.pattern.section.inputs else None for s in (forward, site))
    dtypes = {site.graph.type_of(kernel_input(each)).dtype for each in (forward, site)}
    return forward if len(dtypes) == 1 and of_scale and inverse and given == own and _saves_no_more(site) else None


def _saves_no_more(site: Site) -> bool:
    """Whether backward has no other use of the distance from the mean, which it would then save too."""
    inside = {node.name for node in site.match.nodes.values()}
    users = site.occurrences.users[site["centred"]]
    return all(user.phase == "forward" or user.name in inside for user in users)


def build(site: Site) -> Replacement | None:
    """The kernel of the gradient, from what the kernel of forward takes and gives."""
    forward = _forward(site)
    if forward is None:
        return None
    kernel = forward.node(kernel_result(forward)).name
    mean, scale = Value(kernel, 1), Value(kernel, 2)
    row = row_placements(site.home(forward["mean"]))
    weight = site["weight"] if "weight" in site.pattern.section.inputs else None
    trained = "weight_gradient" in site.match.nodes
    mask = (True, trained, True)
    gradient, x, eps = kernel_input(site), kernel_input(forward), forward.argument("eps")
    args: tuple[Arg, ...] = (gradient, x, weight, None, None, mean, scale, True, eps, mask)
    result = kernel_result(site)
    types: list[TensorType | None] = [site.type(result), None, site.type("bias_gradient")]
    places: list[Placements] = [site.home(site[result]), row, site.home(site["bias_gradient"])]
    if trained:
        types[1], places[1] = site.type("weight_gradient"), site.home(site["weight_gradient"])
    op = "aten.native_batch_norm_backward.default"
    node, strategy = site.make(site.node(result), op, args, tuple(types), tuple(places), {mean: row, scale: row})
    names = (result, *(("weight_gradient",) if trained else ()), "bias_gradient")
    indices = (0, 1, 2) if trained else (0, 2)
    values = {site[name]: Value(node.name, index) for name, index in zip(names, indices, strict=True)}
    return Replacement((node,), {node.name: strategy}, values)


REWRITES = tuple(
    Rewrite(_pattern(affine, trained, dtype), build, _KEPT)
    for dtype in reversed(DTYPES)
    for trained in (True, False)
    for affine in (True, False)
)
