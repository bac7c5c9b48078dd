"""Log-softmax and its gradient: one pass over the classes instead of five."""

from __future__ import annotations

from .pattern import Pattern
from .site import Replacement, Rewrite, Site

FORWARD = Pattern.from_text("""
log_softmax(%x):
  %largest = aten.amax.default(%x, ["?dim"], True)
  %shifted = aten.sub.Tensor(%x, %largest)
  %exp = aten.exp.default(%shifted)
  %total = aten.sum.dim_IntList(%exp, ["?dim"], True)
  %log = aten.log.default(%total)
  %result = aten.sub.Tensor(%shifted, %log)
  return %result
""")
BACKWARD = Pattern.from_text("""
log_softmax_backward(%gradient, %result):
  %exp = aten.exp.default(%result)
  %total = aten.sum.dim_IntList(%gradient, ["?dim"], True)
  %mul = aten.mul.Tensor(%exp, %total)
  %input_gradient = aten.sub.Tensor(%gradient, %mul)
  return %input_gradient
""")


def forward(site: Site) -> Replacement | None:
    dim = site.argument("dim")
    if not site.type("x").dtype.is_floating_point:
        return None
    return site.replace_one("result", "aten._log_softmax.default", (site["x"], dim, False))


def backward(site: Site) -> Replacement | None:
    kind = site.type("input_gradient")
    if not kind == site.type("gradient") == site.type("result"):
        return None
    args = (site["gradient"], site["result"], site.argument("dim"), kind.dtype)
    return site.replace_one("input_gradient", "aten._log_softmax_backward_data.default", args)


REWRITES = (Rewrite(FORWARD, forward), Rewrite(BACKWARD, backward))
