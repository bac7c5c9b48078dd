"""Values that forward computes and backward reads get a rest; text in, text out."""

from __future__ import annotations

from autopar.passes.recompute.saved_values import SaveActivations
from tests.helpers.pass_text import check

AFTER = """
    %y: f32[b, 4] = aten.tanh.default(%x)
    %y_rest: f32[b, 4] = autopar.saved(%y)
    %p: f32[b, 2], %p.1: f32[b, 2] = aten.split.Tensor(%y_rest, 2, 1)
    %p_result1_rest: f32[b, 2] = autopar.saved(%p.1)
    backward %g: f32[b, 4] = aten.tanh_backward.default(%dy, %y_rest)
    backward %h: f32[b, 4] = aten.mul.Tensor(%g, %x)
    backward %i: f32[b, 2] = aten.neg.default(%p_result1_rest)
    return output "0" = %y
    return input_gradient "x" = %h
    """


def test_each_value_rests_once_and_every_use_reads_the_rest() -> None:
    """Inputs, which are held for the whole step, get none."""
    check(
        SaveActivations(),
        """
        %y: f32[b, 4] = aten.tanh.default(%x)
        %p: f32[b, 2], %p.1: f32[b, 2] = aten.split.Tensor(%y, 2, 1)
        backward %g: f32[b, 4] = aten.tanh_backward.default(%dy, %y)
        backward %h: f32[b, 4] = aten.mul.Tensor(%g, %x)
        backward %i: f32[b, 2] = aten.neg.default(%p.1)
        return output "0" = %y
        return input_gradient "x" = %h
        """,
        AFTER,
    )


def test_what_rests_gets_no_other_rest() -> None:
    check(SaveActivations(), AFTER, AFTER)
