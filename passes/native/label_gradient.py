"""The gradient of picking one class per row: written into zeros, instead of multiplied with them.

The decomposition writes -1 where a label is, and multiplies every class with the gradient of its row. Writing that
gradient where the label is gives the same: one pass over the classes less, of two.
"""

from __future__ import annotations

from autopar.ir.node import Node, Value

from .pattern import Pattern
from .site import Replacement, Rewrite, Site

PATTERN = Pattern.from_text("""
label_gradient(%zeros, %labels, %rows):
  %marked = aten.scatter.value(%zeros, "?dim", %labels, "?mark")
  %result = aten.mul.Tensor(%marked, %rows)
  return %result
""")


def build(site: Site) -> Replacement | None:
    """One scatter of the rows' gradients, if the zeros are zeros and each row has one label."""
    zeros = site.graph[site["zeros"].node]
    dim, shape, marked = site.argument("dim"), site.shape("rows"), site.shape("result")
    whole_rows = len(shape) == len(marked) and [d for d in range(len(shape)) if shape[d] != marked[d]] in ([], [dim])
    same = site.type("result").dtype == site.type("rows").dtype == site.type("marked").dtype
    if not (shape and _is_zero(zeros) and whole_rows and same and shape[dim] == 1 and site.shape("labels") == shape):
        return None
    rows, home = site["rows"], site.home(site["rows"])
    scaled, scaling = site.make(
        site.node("marked"), "aten.mul.Tensor", (rows, site.argument("mark")), (site.type("rows"),), (home,)
    )
    value, source = site["result"], Value(scaled.name)
    args = (site["zeros"], dim, site["labels"], source)
    written, writing = site.make(
        site.node("result"), "aten.scatter.src", args, (site.type("result"),), (site.home(value),), {source: home}
    )
    return Replacement((scaled, written), {scaled.name: scaling, written.name: writing}, {value: Value(written.name)})


def _is_zero(node: Node) -> bool:
    return node.op == "aten.full.default" and node.args[1] == 0


REWRITES = (Rewrite(PATTERN, build),)
