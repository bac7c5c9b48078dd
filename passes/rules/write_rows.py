"""Rows copied to positions of one dim: every other dim can be sharded."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.placements import AxisStrategy
from autopar.ops.write_rows import WRITE_ROWS
from autopar.passes.rule_language.claims import P, S, claim, claim_rule
from autopar.passes.rule_language.registry import OpCall


@claim_rule(WRITE_ROWS, "aten.index_copy.default", agnostic=False)
def write_rows(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, dim, index, rows)``, linear in x and the rows together"""
    rank = call.inputs[0].rank
    written = int(call.arg(1, "dim")) % max(rank, 1)
    for dim in range(rank):
        if dim != written:
            yield claim(call, {0: S(dim), 2: S(dim)}, [S(dim)])
    yield claim(call, {0: P, 2: P}, [P])
