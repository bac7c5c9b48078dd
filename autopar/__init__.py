"""autopar: automatic parallelism for PyTorch, by an integer program over placements.

>>> import autopar
>>> model = autopar.parallelize(model, mesh)  # doctest: +SKIP

:func:`parallelize` trains a model on a mesh, :func:`plan` plans without running, and :func:`verify` compares a plan
with one process. :func:`price` and :func:`plan_layouts` price and search layouts of large models.
"""

from autopar.runtime.module import ParallelModule

from .api import parallelize, plan
from .cluster import Cluster
from .errors import (
    AutoparError,
    GraphError,
    IndexRangeError,
    InfeasibleError,
    InputMismatchError,
    OperatorError,
    OptionsError,
    PlanMismatchError,
    TraceError,
    WorkerError,
)
from .graph import Graph
from .layout import Layout
from .layout_model import price
from .layout_price import Priced
from .layout_report import LayoutReport, plan_layouts
from .options import Options
from .plan import Plan
from .plan_timeline import step_timeline
from .reprice import reprice
from .verify import verify
from .verify_report import Report

__all__ = [
    "AutoparError",
    "Cluster",
    "Graph",
    "GraphError",
    "IndexRangeError",
    "InfeasibleError",
    "InputMismatchError",
    "Layout",
    "LayoutReport",
    "OperatorError",
    "Options",
    "OptionsError",
    "ParallelModule",
    "Plan",
    "PlanMismatchError",
    "Priced",
    "Report",
    "TraceError",
    "WorkerError",
    "parallelize",
    "plan",
    "plan_layouts",
    "price",
    "reprice",
    "step_timeline",
    "verify",
]


def __dir__() -> list[str]:
    """The public names: what tab completion offers. Submodules can be imported all the same."""
    return sorted([*__all__, "__doc__", "__name__"])
