"""Equal operations become one; text in, text out."""

from __future__ import annotations

from autopar.passes.normalise.eliminate_common import MergeCommon
from tests.helpers.pass_text import check


def test_equal_operations_are_one_of_the_phase_that_needs_it_first() -> None:
    check(
        MergeCommon(),
        """
        backward %g: f32[b, 4] = aten.tanh.default(%x)
        %a: f32[b, 4] = aten.tanh.default(%x)
        %p: f32[b, 2], %p.1: f32[b, 2] = aten.split.Tensor(%a, 2, 1)
        backward %q: f32[b, 2], %q.1: f32[b, 2] = aten.split.Tensor(%g, 2, 1)
        %r: f32[b, 2] = aten.neg.default(%p.1)
        %u: f32[b, 4] = aten.bernoulli.p(%x, 0.5)
        %v: f32[b, 4] = aten.bernoulli.p(%x, 0.5)
        %one: f32[] = aten.full.default([], 1)
        %true: b8[] = aten.full.default([], True)
        backward %z: f32[b, 4] = aten.mul.Tensor(%g, %dy)
        backward %s: f32[b, 2] = aten.add.Tensor(%p.1, %q.1)
        return output "0" = %r
        return output "1" = %u
        return output "2" = %v
        return gradient "w" = %z
        return gradient "v" = %s
        """,
        """
        %g: f32[b, 4] = aten.tanh.default(%x)
        %p: f32[b, 2], %p.1: f32[b, 2] = aten.split.Tensor(%g, 2, 1)
        %r: f32[b, 2] = aten.neg.default(%p.1)
        %u: f32[b, 4] = aten.bernoulli.p(%x, 0.5)
        %v: f32[b, 4] = aten.bernoulli.p(%x, 0.5)
        backward %one: f32[] = aten.full.default([], 1)
        backward %true: b8[] = aten.full.default([], True)
        backward %z: f32[b, 4] = aten.mul.Tensor(%g, %dy)
        backward %s: f32[b, 2] = aten.add.Tensor(%p.1, %p.1)
        return output "0" = %r
        return output "1" = %u
        return output "2" = %v
        return gradient "w" = %z
        return gradient "v" = %s
        """,
    )
