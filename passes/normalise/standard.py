"""The standard pipeline from a traced graph to the graph that rules, prices and the solver use."""

from __future__ import annotations

from autopar.ir.graph import Graph
from autopar.passes.base import Pass, run

from .canonical_views import CanonicalViews
from .cast_once import CastOnce
from .drop_noops import DropNoops
from .eliminate_common import MergeCommon
from .eliminate_dead import RemoveDead
from .gather_rows import GatherRows
from .known_masks import KnownMasks
from .sink_views import SinkViews
from .write_caches import WriteCaches

# No-ops go first, so that chains of views become adjacent; their composition may leave further no-ops.
STANDARD: tuple[Pass, ...] = (
    DropNoops(),
    CanonicalViews(),
    DropNoops(),
    GatherRows(),
    MergeCommon(),
    KnownMasks(),
    RemoveDead(),
    SinkViews(),
    RemoveDead(),
    CastOnce(),
    WriteCaches(),
)


def normalise(graph: Graph) -> Graph:
    """The graph in normal form: one spelling per operation, no redundant operations, no view saved for backward."""
    return run(STANDARD, graph)
