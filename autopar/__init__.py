"""autopar: automatic parallelism for PyTorch, by an integer program over placements.

>>> import autopar
>>> model = autopar.parallelize(model, mesh)  # doctest: +SKIP

:func:`parallelize` trains a model on a mesh, :func:`plan` plans without running, and :func:`verify` compares a plan
with one process. :func:`price` plans a layout chosen by hand, and :func:`plan_layouts` compares plans for so many
devices.
"""

# ruff: noqa: E402 - the imports below may fail on a torch that is not supported: warn first.
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .supported import installed_version, warn_of_other_torch

warn_of_other_torch()
__version__ = installed_version()

from .errors import (
    AutoparError,
    FaultError,
    GraphError,
    IndexRangeError,
    InfeasibleError,
    InputMismatchError,
    OperatorError,
    OptionsError,
    PlanMismatchError,
    TraceError,
    ValueFaultError,
    WorkerError,
)

if TYPE_CHECKING:
    from autopar.cluster.description import Cluster
    from autopar.compiler.plan_ahead import PlansAhead, plan_ahead
    from autopar.ir.graph import Graph
    from autopar.planner.expert_imbalance import expert_imbalance
    from autopar.plans.plan import Plan
    from autopar.plans.views.step_timeline import step_timeline
    from autopar.priced.plan_layouts import plan_layouts
    from autopar.priced.price import price
    from autopar.priced.priced import Priced
    from autopar.priced.report import LayoutReport
    from autopar.runtime.averaging.replica_module import ReplicaModule
    from autopar.runtime.faults.stopping import stopping
    from autopar.runtime.module.parallel_module import ParallelModule
    from autopar.search.reprice import reprice
    from autopar.verification.report import Report
    from autopar.verification.verify import verify

    from .api import parallelize, plan
    from .layout import Layout
    from .options import Options
    from .sync import DiLoCo, Gossip, LocalSGD, PowerSGD, TopK

__all__ = [
    "AutoparError",
    "Cluster",
    "DiLoCo",
    "FaultError",
    "Gossip",
    "Graph",
    "GraphError",
    "IndexRangeError",
    "InfeasibleError",
    "InputMismatchError",
    "Layout",
    "LayoutReport",
    "LocalSGD",
    "OperatorError",
    "Options",
    "OptionsError",
    "ParallelModule",
    "Plan",
    "PlanMismatchError",
    "PlansAhead",
    "PowerSGD",
    "Priced",
    "ReplicaModule",
    "Report",
    "TopK",
    "TraceError",
    "ValueFaultError",
    "WorkerError",
    "expert_imbalance",
    "parallelize",
    "plan",
    "plan_ahead",
    "plan_layouts",
    "price",
    "reprice",
    "step_timeline",
    "stopping",
    "verify",
]


# Where the other names are: loaded when one is first asked for. A training does not need solvers, which take more than
# a second of a processor to import on each rank, and viewing a plan file nothing that traces or runs models.
_LATER = {
    **dict.fromkeys(("parallelize", "plan"), "autopar.api"),
    **dict.fromkeys(("PlansAhead", "plan_ahead"), "autopar.compiler.plan_ahead"),
    **dict.fromkeys(("DiLoCo", "Gossip", "LocalSGD", "PowerSGD", "TopK"), "autopar.sync"),
    "Cluster": "autopar.cluster.description",
    "Graph": "autopar.ir.graph",
    "Layout": "autopar.layout",
    "LayoutReport": "autopar.priced.report",
    "Options": "autopar.options",
    "ParallelModule": "autopar.runtime.module.parallel_module",
    "Plan": "autopar.plans.plan",
    "Priced": "autopar.priced.priced",
    "ReplicaModule": "autopar.runtime.averaging.replica_module",
    "Report": "autopar.verification.report",
    "expert_imbalance": "autopar.planner.expert_imbalance",
    "plan_layouts": "autopar.priced.plan_layouts",
    "price": "autopar.priced.price",
    "reprice": "autopar.search.reprice",
    "step_timeline": "autopar.plans.views.step_timeline",
    "stopping": "autopar.runtime.faults.stopping",
    "verify": "autopar.verification.verify",
}


def __getattr__(name: str) -> object:
    """A name of ``_LATER`` or a module, imported now. Raises ``AttributeError`` for any other."""
    if name not in _LATER:
        # A dotted name is none of this module's, and is not looked for: hasattr expects no other error.
        if name.startswith("_") or not name.isidentifier() or find_spec(f"autopar.{name}") is None:
            raise AttributeError(f"module 'autopar' has no attribute {name!r}")
        return import_module(f"autopar.{name}")
    value = getattr(import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, which tab completion offers. Submodules can still be imported."""
    return sorted([*__all__, "__doc__", "__name__", "__version__"])
