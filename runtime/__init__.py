"""Runs lowered programs: process groups, collectives, the executor, the parallel module, and local ranks.

A :class:`~autopar.ir.program.Program` says everything a rank does; nothing is decided here. ``Partial``
placements of whole values follow torch: the sum is carried by the first device of the axis, the others hold
zeros (``collective.partial``).

===================  ========================================================================================
``groups``           :func:`mesh_groups`: process groups over sets of mesh axes, :func:`mesh_of_one`
``collectives``      :class:`Collectives`: the ``collective.*`` operations, over the backend ``gloo`` or ``native``
``section_source``   each section of a program as the text of a Python function; ``section_code`` compiles it
``executor``         :class:`Executable`: a program bound to this rank's groups and constants
``parameters``       :func:`place_parameters`: a module's parameters as DTensors, in place
``materialise``      :func:`materialise`: initial values of a meta model, one tensor at a time
``module``           :class:`ParallelModule`: the model a user holds, made of ``call``, ``autograd``, ``weights``
``programs``         :class:`Programs`: its compiled calls, by kind of call (``call_kind``) and guards
``input_checks``     what ranks compare before a call: kinds of calls, and what inputs hold (``content_hash``)
``pipeline_run``     one rank's list of instructions for a step in microbatches; ``pipeline_call`` binds it
``launch``           :func:`run_local`: a function on several local processes
===================  ========================================================================================
"""

from autopar.runtime.calls.compiled import Compile, Compiled, Request
from autopar.runtime.comm.collectives import Collectives, Handle
from autopar.runtime.comm.groups import AxisGroup, MeshGroups, mesh_groups, mesh_of_one
from autopar.runtime.execute.executor import Executable
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.state.materialise import materialise
from autopar.runtime.state.parameters import gather_whole, place_parameters, torch_placements

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
