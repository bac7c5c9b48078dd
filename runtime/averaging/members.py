"""Which replicas there are, and which of them are left."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Members:
    """``present``: the indices on the outermost axis of the replicas that train together, of which this one is ``own``.
    They become fewer as replicas leave, at the same exchange on every rank of a replica."""

    own: int
    present: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.present)

    @property
    def index(self) -> int:
        """The place of this replica among them."""
        return self.present.index(self.own)
