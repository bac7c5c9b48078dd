"""Backward makes views again rather than keep them; text in, text out."""

from __future__ import annotations

from autopar.passes.normalise.sink_views import SinkViews
from tests.helpers.pass_text import check


def test_views_that_backward_reads_are_made_again_there() -> None:
    check(
        SinkViews(),
        """
        %i: i64[4] = aten.arange.default(4)
        %j: i64[4] = aten.mul.Tensor(%i, 2)
        %t: f32[4, b] = aten.permute.default(%x, [1, 0])
        %r: f32[2, 2, b] = aten.reshape.default(%t, [2, 2, b])
        %e: f32[2, 2, b] = aten.exp.default(%r)
        %f: f32[2, 2, b] = aten.mul.Tensor(%e, %j)
        backward %m: f32[2, 2, b] = aten.mul.Tensor(%r, %e)
        backward %n: f32[2, 2, b] = aten.mul.Tensor(%m, %j)
        backward %o: f32[4, b] = aten.mul.Tensor(%t, %n)
        return output "0" = %f
        return gradient "w" = %o
        """,
        """
        %i: i64[4] = aten.arange.default(4)
        %j: i64[4] = aten.mul.Tensor(%i, 2)
        %t: f32[4, b] = aten.permute.default(%x, [1, 0])
        %r: f32[2, 2, b] = aten.reshape.default(%t, [2, 2, b])
        %e: f32[2, 2, b] = aten.exp.default(%r)
        %f: f32[2, 2, b] = aten.mul.Tensor(%e, %j)
        backward %t_again: f32[4, b] = aten.permute.default(%x, [1, 0])
        backward %r_again: f32[2, 2, b] = aten.reshape.default(%t_again, [2, 2, b])
        backward %m: f32[2, 2, b] = aten.mul.Tensor(%r_again, %e)
        backward %i_again: i64[4] = aten.arange.default(4)
        backward %j_again: i64[4] = aten.mul.Tensor(%i_again, 2)
        backward %n: f32[2, 2, b] = aten.mul.Tensor(%m, %j_again)
        backward %o: f32[4, b] = aten.mul.Tensor(%t_again, %n)
        return output "0" = %f
        return gradient "w" = %o
        """,
    )
