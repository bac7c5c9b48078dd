"""Operations that change nothing are dropped; text in, text out."""

from __future__ import annotations

from autopar.passes.normalise.drop_noops import DropNoops
from tests.helpers.pass_text import check


def test_what_changes_nothing_is_dropped() -> None:
    check(
        DropNoops(),
        """
        %a: f32[b, 4] = aten.detach.default(%x)
        %c: f32[b, 4] = aten.clone.default(%a, memory_format=torch.contiguous_format)
        %d: f32[b, 4] = aten.view.default(%c, [-1, 4])
        %e: f32[b, 4] = aten.slice.Tensor(%d, 0, 0, 9223372036854775807)
        %f: f32[b, 4] = aten.expand.default(%e, [b, 4])
        %g: f32[b, 4] = aten._to_copy.default(%f, dtype=torch.float32)
        %h: f32[b, 4] = aten.add.Tensor(%g, 0)
        %i: f32[b, 4] = aten.mul.Tensor(%h, 1.0)
        %none: f32[0] = aten.full.default([0], 0)
        %j: f32[b, 4] = aten.cat.default([%none, %i], 1)
        %k: f32[b, 4] = aten.permute.default(%j, [0, 1])
        %l: f32[b, 4] = aten.relu.default(%k)
        return output "0" = %l
        """,
        """
        %none: f32[0] = aten.full.default([0], 0)
        %l: f32[b, 4] = aten.relu.default(%x)
        return output "0" = %l
        """,
    )


def test_what_changes_something_stays() -> None:
    body = """
        %a: f64[b, 4] = aten._to_copy.default(%x, dtype=torch.float64)
        %c: f32[b, 4] = aten.slice.Tensor(%x, 0, 0, 9223372036854775807, 1)
        %d: f32[1, 4] = aten.slice.Tensor(%x, 0, 0, 1)
        %e: f32[b, 4] = aten.mul.Tensor(%d, %x)
        %n: i64[b] = aten.arange.default(b)
        %f: f32[b] = aten.add.Tensor(%n, 0.0)
        %g: f32[b, 4] = aten.permute.default(%x, [1, 0])
        %h: f32[b, 4] = aten.bernoulli.p(%x, 0.5)
        %t: b8[] = aten.full.default([], True)
        %m: b8[4] = aten.ne.Scalar(%w, 1)
        %k: b8[4] = aten.bitwise_and.Tensor(%t, %m)
        %p: f32[b, 4] = aten.constant_pad_nd.default(%x, [1, -1])
        return output "0" = %a
        return output "1" = %e
        return output "2" = %f
        return output "3" = %g
        return output "4" = %h
        return output "5" = %k
        return output "6" = %p
        """
    after = body.replace("        %c: f32[b, 4] = aten.slice.Tensor(%x, 0, 0, 9223372036854775807, 1)\n", "")
    after = after.replace("        %k: b8[4] = aten.bitwise_and.Tensor(%t, %m)\n", "").replace("= %k", "= %m")
    check(DropNoops(), body, after)


def test_copies_stay_where_strides_matter() -> None:
    body = """
        %a: f32[b, 4] = aten.clone.default(%x, memory_format=torch.contiguous_format)
        %s: f32[2] = aten.as_strided.default(%a, [2], [4])
        return output "0" = %s
        """
    check(DropNoops(), body, body)
