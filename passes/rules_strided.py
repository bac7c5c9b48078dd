"""The agnostic ones among operations with rules written out by hand: what may be sharded may be strided.

Convolutions and group norms are not: their channels come in runs, which a stride would cut. Local operations,
which count positions from an offset, are excepted by :mod:`.dimension_strings` itself.
"""

from __future__ import annotations

from .dimension_strings import AGNOSTIC

_FAMILIES = (
    # Products of matrices.
    ("mm", "bmm", "mv", "dot", "vdot", "addmm", "baddbmm", "addmv"),
    # Softmax, over other dims.
    (
        "_softmax",
        "_log_softmax",
        "_safe_softmax",
        "_softmax_backward_data",
        "_log_softmax_backward_data",
        "logsumexp",
    ),
    # Norms, over other dims.
    (
        "native_layer_norm",
        "native_layer_norm_backward",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "rms_norm",
    ),
    # Reads and writes by position: dims where position i meets position i, and those of the index.
    (
        "embedding",
        "embedding_dense_backward",
        "gather",
        "index_select",
        "scatter_add",
        "index_add",
        "index_put",
    ),
)
AGNOSTIC.update(f"aten.{name}.default" for family in _FAMILIES for name in family)
AGNOSTIC.update(f"aten.{name}.dtype" for name in ("mm", "bmm", "addmm", "baddbmm"))
AGNOSTIC.update(f"aten.scatter.{overload}" for overload in ("value", "src", "reduce", "value_reduce"))
AGNOSTIC.update(("aten.index.Tensor", "aten.scatter_reduce.two"))
