"""Parameters whose gradients are of a scaled loss are marked; text in, text out."""

from __future__ import annotations

from autopar.passes.normalise.scaled_loss import ScaledLoss
from tests.helpers.pass_text import check

BEFORE = """
graph()
%w: bf16[4, 4] = param("w", stored=torch.float32)
%v: f32[4, 4] = param("v")
%table: f32[4, 4] = param("table")
backward %d: f32[4, 4] = tangent("0")
%y: f32[4, 4] = aten.mm.default(%v, %table)
backward %g: f32[4, 4] = aten.mm.default(%d, %w)
return output "0" = %y
return gradient "w" = %g
return gradient "v" = %g
return gradient "table" = none
"""
AFTER = BEFORE.replace("torch.float32)", "torch.float32, scaled=True)").replace('param("v")', 'param("v", scaled=True)')


def test_parameters_with_a_gradient_are_marked() -> None:
    check(ScaledLoss(), BEFORE, AFTER)


def test_none_is_marked_twice() -> None:
    check(ScaledLoss(), AFTER, AFTER)
