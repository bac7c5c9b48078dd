"""Seconds of an optimizer's update of one parameter on one device, once a step."""

from __future__ import annotations

from autopar.cluster.device import Device


def update_seconds(device: Device, gradient: float, value: float, states: float) -> float:
    """Seconds to update a value of so many bytes: its ``gradient`` is read, value and ``states`` are read and
    written."""
    return (gradient + 2 * (value + states)) / device.updates


def casting_seconds(device: Device, stored: float, copy: float) -> float:
    """Seconds to cast an updated value to the dtype in which a step reads it; bytes of both."""
    return device.launch_seconds + (stored + copy) / device.memory_bandwidth
