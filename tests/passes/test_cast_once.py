"""Casts of parameters to fewer bits become the parameters' own; text in, text out."""

from __future__ import annotations

from autopar.ir.graph import Graph
from autopar.passes.normalise.cast_once import CastOnce
from tests.helpers.pass_text import check

CASTS = """\
graph(b=8)
%w: f32[4, 4] = param("w")
%table: f32[4, 4] = param("table")
%x: f32[b, 4] = input("x")
%d: bf16[b, 4] = tangent("0")
%half: bf16[4, 4] = aten._to_copy.default(%w, dtype=torch.bfloat16)
%table_half: bf16[4, 4] = aten._to_copy.default(%table, dtype=torch.bfloat16)
%looked: f32[b, 4] = aten.mm.default(%x, %table)
%x_half: bf16[b, 4] = aten._to_copy.default(%looked, dtype=torch.bfloat16)
%y: bf16[b, 4] = aten.mm.default(%x_half, %half)
%z: bf16[b, 4] = aten.mm.default(%y, %table_half)
backward %g: bf16[4, 4] = aten.mm.default(%half, %half)
backward %grad: f32[4, 4] = aten._to_copy.default(%g, dtype=torch.float32)
return output "0" = %z
return gradient "w" = %grad
return gradient "table" = none
"""


def test_a_parameter_that_is_only_cast_is_cast_once() -> None:
    """The table is read as it is, too: its cast stays."""
    check(
        CastOnce(),
        CASTS,
        """
        graph(b=8)
        %w: bf16[4, 4] = param("w", stored=torch.float32)
        %table: f32[4, 4] = param("table")
        %x: f32[b, 4] = input("x")
        %d: bf16[b, 4] = tangent("0")
        %table_half: bf16[4, 4] = aten._to_copy.default(%table, dtype=torch.bfloat16)
        %looked: f32[b, 4] = aten.mm.default(%x, %table)
        %x_half: bf16[b, 4] = aten._to_copy.default(%looked, dtype=torch.bfloat16)
        %y: bf16[b, 4] = aten.mm.default(%x_half, %w)
        %z: bf16[b, 4] = aten.mm.default(%y, %table_half)
        backward %g: bf16[4, 4] = aten.mm.default(%w, %w)
        backward %grad: f32[4, 4] = aten._to_copy.default(%g, dtype=torch.float32)
        return output "0" = %z
        return gradient "w" = %grad
        return gradient "table" = none
        """,
    )


def test_a_cast_to_as_many_bits_stays() -> None:
    wider = CASTS.replace("f32", "f16").replace("float32", "float16")
    check(CastOnce(), wider, wider)


def test_casts_of_a_parameter_that_is_returned_stay() -> None:
    returned = CASTS.replace('return gradient "w" = %grad', 'return gradient "w" = %w')
    assert "stored" not in CastOnce()(Graph.from_text(returned)).to_text()
