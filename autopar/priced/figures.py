"""Figures that follow from a plan and the hardware that it was made for."""

from __future__ import annotations

import torch

from autopar.cluster.description import Cluster
from autopar.cluster.device import Device
from autopar.cluster.groups import devices_of
from autopar.cost import working_dtype
from autopar.ir.node import DTYPE_NAMES
from autopar.ir.plan_record import Predicted
from autopar.placement.predicted import devices_flops
from autopar.plans.moves import types_of
from autopar.plans.plan import Plan


def device_flops(plan: Plan, cluster: Cluster) -> float:
    """FLOP/s of products of a device, on average: what a step that did nothing else would do, relative to which the
    plan's MFU counts."""
    devices = plan.stage_meshes.devices
    return devices_flops(cluster, devices, _working_dtype(plan)) / devices


def bubble_of(predicted: Predicted) -> float:
    """Seconds of the bubble; 0 if they are no more than the rounding of the step."""
    return predicted.bubble_seconds if predicted.bubble_seconds > 1e-9 * predicted.step_seconds else 0.0


def notes_on(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """What was assumed because the description of a device omits the rate of products, then the plan's warnings."""
    dtype = _working_dtype(plan)
    devices = devices_of(cluster.groups, 0, plan.stage_meshes.devices) or (cluster.device,)
    return (*(_without_rate(device, dtype) for device in devices if not device.has_rate(dtype)), *plan.warnings)


def _without_rate(device: Device, dtype: torch.dtype) -> str:
    rates, name = device.peak_flops, DTYPE_NAMES.get(dtype, str(dtype))
    slowest = min(rates, key=lambda each: rates[each])
    return (
        f"a {device.name} has no rate of products in {name}: they are priced as {slowest}, its slowest; its rates are "
        f"of {', '.join(rates)}"
    )


def _working_dtype(plan: Plan) -> torch.dtype:
    """As :func:`autopar.placement.predicted.dtype_of` the planned graph."""
    kinds = {name: types[0] for name, node in plan.nodes.items() if (types := types_of(node.type))}
    return working_dtype(
        [
            (node.op, [kinds[operand] for operand in node.operands if operand in kinds], kinds[name])
            for name, node in plan.nodes.items()
            if name in kinds
        ]
    )
