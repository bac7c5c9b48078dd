"""Runs lowered programs: process groups, collectives, the executor, the parallel module, and local ranks.

A :class:`~autopar.ir.program.Program` says everything that a rank does; the runtime decides nothing. ``Partial``
placements of whole values follow torch: the first device of the axis has the sum, the others have zeros
(``collective.partial``).
"""

from autopar.runtime.calls.compiled import Compile, Compiled, Request
from autopar.runtime.comm.collectives import Collectives, Handle
from autopar.runtime.comm.groups import AxisGroup, MeshGroups, mesh_groups, mesh_of_one
from autopar.runtime.execute.executor import Executable
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.state.materialise import materialise
from autopar.runtime.state.parameters import gather_whole, torch_placements
from autopar.runtime.state.placing import place_parameters

from .launch import run_local

__all__ = [
    "AxisGroup",
    "Collectives",
    "Compile",
    "Compiled",
    "Executable",
    "Handle",
    "MeshGroups",
    "ParallelModule",
    "Request",
    "gather_whole",
    "materialise",
    "mesh_groups",
    "mesh_of_one",
    "place_parameters",
    "run_local",
    "torch_placements",
]
