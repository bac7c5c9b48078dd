"""Views are written as reshape, permute, expand and slices with plain bounds; text in, text out."""

from __future__ import annotations

from autopar.passes.normalise.canonical_views import CanonicalViews
from tests.helpers.pass_text import check


def test_each_view_has_one_form() -> None:
    check(
        CanonicalViews(),
        """
        %a: f32[4*b] = aten.view.default(%x, [-1])
        %c: f32[2, 2*b] = aten._unsafe_view.default(%a, [2, -1])
        %d: f32[2, 1, 2*b] = aten.unsqueeze.default(%c, 1)
        %e: f32[2, 2*b] = aten.squeeze.dim(%d, 1)
        %f: f32[2*b, 2] = aten.t.default(%e)
        %g: f32[1, 2*b, 2] = aten.unsqueeze.default(%f, 0)
        %h: f32[2, 2*b, 1] = aten.transpose.int(%g, 0, -1)
        %i: f32[1, 2, 2*b] = aten.permute.default(%h, [-1, 0, 1])
        %j: f32[3, 2, 2*b] = aten.expand.default(%i, [3, -1, -1])
        %k: f32[3, 2, b] = aten.slice.Tensor(%j, -1, b)
        %l: f32[3, 1, b] = aten.slice.Tensor(%k, 1, -1)
        return output "0" = %l
        """,
        """
        %a: f32[4*b] = aten.reshape.default(%x, [4*b])
        %c: f32[2, 2*b] = aten.reshape.default(%x, [2, 2*b])
        %d: f32[2, 1, 2*b] = aten.reshape.default(%x, [2, 1, 2*b])
        %e: f32[2, 2*b] = aten.reshape.default(%x, [2, 2*b])
        %f: f32[2*b, 2] = aten.permute.default(%e, [1, 0])
        %g: f32[1, 2*b, 2] = aten.reshape.default(%f, [1, 2*b, 2])
        %h: f32[2, 2*b, 1] = aten.permute.default(%g, [2, 1, 0])
        %i: f32[1, 2, 2*b] = aten.permute.default(%g, [0, 2, 1])
        %j: f32[3, 2, 2*b] = aten.expand.default(%i, [3, 2, 2*b])
        %k: f32[3, 2, b] = aten.slice.Tensor(%j, 2, b, 2*b, 1)
        %l: f32[3, 1, b] = aten.slice.Tensor(%k, 1, 1, 2, 1)
        return output "0" = %l
        """,
    )


def test_views_stay_where_strides_matter() -> None:
    body = """
        %a: f32[b, 4] = aten.clone.default(%x, memory_format=torch.contiguous_format)
        %s: f32[2] = aten.as_strided.default(%a, [2], [4])
        return output "0" = %s
        """
    check(CanonicalViews(), body, body)
