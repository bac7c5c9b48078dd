"""The error for an operation that couples the samples of a batch, so that microbatches would compute something else."""

from __future__ import annotations

from autopar.errors import OptionsError
from autopar.ir.node import Node, Value


class CoupledError(OptionsError):
    """An operation couples the samples of a batch, so microbatches cannot compute it. ``count``: how many were asked
    for; ``why``: which operation."""

    count: int
    why: str

    @staticmethod
    def of(why: str, count: int, asked: str, instead: str) -> CoupledError:
        """The error for what was ``asked`` for, ``instead`` of which something else would do."""
        error = CoupledError(
            f"{asked}: {why}; use {instead}, a layer that treats samples alone (group or layer norm in place of batch "
            'norm), or Options(batch_statistics="microbatch"), under which every microbatch is a batch of its own, as '
            "in a loop that accumulates gradients"
        )
        error.count, error.why = count, why
        return error

    def under_layout(self, microbatch: int) -> CoupledError:
        """The error where a layout gives the samples of a ``microbatch``."""
        asked = f"Layout(microbatch={microbatch}), which makes {self.count} microbatches"
        return self.of(
            self.why, self.count, asked, f"microbatch={self.count * microbatch} (all samples of a data rank)"
        )


def split_error(node: Node, count: int, value: Value) -> CoupledError:
    """The error for an operation that needs all microbatches at once."""
    where = "".join(f", {part}" for part in (node.module and f"in {node.module}", node.source) if part)
    why = (
        f"{node.op} (%{node.name}{where}) couples the samples of a batch: it needs {value} of all microbatches at once"
    )
    return CoupledError.of(why, count, f"microbatches={count}", "microbatches=1")
