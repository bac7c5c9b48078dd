"""Devices that cannot be arranged on a mesh of another shape, and what that leaves of the options."""

from __future__ import annotations

import math
from dataclasses import replace

import torch.distributed as dist

from autopar.errors import OptionsError
from autopar.ir.stage_meshes import Mesh
from autopar.options import Options
from autopar.plans.plan import Plan
from autopar.runtime.comm.groups import MeshGroups
from autopar.search.stage_meshes import layout_for, layout_of
from autopar.sync import EVERY_STEP


def with_fixed_axes(options: Options, plan: Plan | None, groups: MeshGroups) -> Options:
    """``options`` without the search for a mesh, if these devices must keep theirs: a mesh of some of the ranks, since
    to arrange devices is collective over all ranks, and those outside do not take part; and one whose ranks do not
    ascend from device to device (a transposed one), since on a mesh of another shape they might not along an axis.
    Raises :class:`OptionsError` if they would not on that of ``plan`` or, without one, on that of the stages that are
    asked for."""
    if not groups.ascends_on((groups.mesh.size(),)):
        _check_ascends(options, plan, groups)
        return replace(options, mesh_search=False)
    in_part = dist.is_initialized() and groups.mesh.size() < dist.get_world_size()
    return replace(options, mesh_search=False) if in_part else options


def _check_ascends(options: Options, plan: Plan | None, groups: MeshGroups) -> None:
    outer = () if options.sync == EVERY_STEP else groups.shape[:1]
    inside = groups.shape[len(outer) :]
    needed = _of_stages(options, inside) if plan is None else _of_plan(plan)
    # A plan for another number of devices is refused for that.
    if needed is None or math.prod(needed) != math.prod(inside) or groups.ascends_on((*outer, *needed)):
        return
    asking = f"stages={options.stages}" if plan is None else f"the plan for the mesh {plan.mesh}"
    ranks, kind = groups.mesh.mesh.tolist(), groups.mesh.device_type
    raise OptionsError(
        f"{asking} needs the devices on a mesh {(*outer, *needed)}, along an axis of which the ranks {ranks} do not "
        f"ascend: order them, for example by init_device_mesh({kind!r}, {groups.shape})"
    )


def _of_plan(plan: Plan) -> Mesh:
    return plan.mesh if plan.stages == 1 else plan.stage_meshes.whole


def _of_stages(options: Options, mesh: Mesh) -> Mesh | None:
    """The mesh of all devices with the stages that ``options`` ask for; None if they ask for none, or for stages that
    do not have the axes of ``mesh``, of which planning says what to do."""
    stages = options.stages
    if stages is None:
        return None
    layout = layout_of(mesh, stages) if isinstance(stages, tuple) else layout_for(mesh, stages)
    return None if layout is None or layout.counts else (layout.stages, *layout.mesh)
