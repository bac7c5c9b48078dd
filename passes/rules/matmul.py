"""Matrix products, with and without an addend."""

from __future__ import annotations

from autopar.passes.rule_language.dimension_strings import dimension_rule

dimension_rule(("aten.mm.default", "aten.mm.dtype"), "mk,kn->mn")
dimension_rule(("aten.bmm.default", "aten.bmm.dtype"), "bmk,bkn->bmn")
dimension_rule("aten.mv.default", "mk,k->m")
dimension_rule(("aten.dot.default", "aten.vdot.default"), "k,k->")
dimension_rule(("aten.addmm.default", "aten.addmm.dtype"), "mn+mk,kn->mn")
dimension_rule(("aten.baddbmm.default", "aten.baddbmm.dtype"), "bmn+bmk,bkn->bmn")
dimension_rule("aten.addmv.default", "m+mk,k->m")
