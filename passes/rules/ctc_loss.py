"""The loss of connectionist temporal classification (:mod:`autopar.ops.ctc_loss`): sequences can be sharded; time steps
and classes cannot."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.placements import AxisStrategy
from autopar.passes.rule_language.claims import S, claim, claim_rule
from autopar.passes.rule_language.registry import OpCall


@claim_rule("autopar.ctc_loss.default")
def ctc_loss(call: OpCall) -> Iterator[AxisStrategy]:
    """``(log_probs [T, N, C], targets [N, S], lengths [N], lengths [N])`` -> [N], [T, N, C]"""
    yield claim(call, {0: S(1), 1: S(0), 2: S(0), 3: S(0)}, [S(0), S(1)])
