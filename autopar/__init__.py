"""autopar: a declarative graph compiler for automatic parallelism in PyTorch.

>>> import autopar
>>> model = autopar.parallelize(model, mesh)  # doctest: +SKIP
"""

from autopar.runtime.module import ParallelModule

from .api import parallelize, plan
from .cluster import Cluster
from .errors import (
    AutoparError,
    GraphError,
    InfeasibleError,
    OperatorError,
    OptionsError,
    PlanMismatchError,
    TraceError,
    WorkerError,
)
from .graph import Graph
from .options import Options
from .plan import Plan
from .plan_timeline import step_timeline
from .reprice import reprice
from .verify import Report, verify

__all__ = [
    "AutoparError",
    "Cluster",
    "Graph",
    "GraphError",
    "InfeasibleError",
    "OperatorError",
    "Options",
    "OptionsError",
    "ParallelModule",
    "Plan",
    "PlanMismatchError",
    "Report",
    "TraceError",
    "WorkerError",
    "parallelize",
    "plan",
    "reprice",
    "step_timeline",
    "verify",
]
