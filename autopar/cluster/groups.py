"""Groups of devices of one kind, for clusters of several kinds; and the device that stands for several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.keywords import suggests_fields

from .device import Device
from .links import require

# Fields of a device of which less is worse, and of which more is.
_LESS_IS_WORSE = (
    "memory_bandwidth",
    "host_bandwidth",
    "host_memory_bytes",
    "nvme_read_bandwidth",
    "nvme_write_bandwidth",
    "nvme_bytes",
    "masked_attention",
    "grouped_products",
)
_MORE_IS_WORSE = (
    "launch_seconds",
    "view_seconds",
    "host_seconds",
    "memory_stalls",
    "function_seconds",
    "host_latency",
    "nvme_latency",
    "attention_length",
)


@suggests_fields
@dataclass(frozen=True)
class Group:
    """``count`` consecutive devices of one kind. The first group of a cluster has its first ranks."""

    count: int
    device: Device

    def __post_init__(self) -> None:
        require(
            isinstance(self.device, Device),
            f"the device of a group is {self.device!r}, not a Device; Cluster.get('dgx-a100-80gb').device is one",
        )
        require(self.count > 0, f"a group of {self.device.name!r} has {self.count!r} devices; give at least 1")


def devices_of(groups: Sequence[Group], first: int, count: int) -> tuple[Device, ...]:
    """The kinds of device among ``count`` ranks from ``first`` on, each once, in their order."""
    kinds, begin = list[Device](), 0
    for group in groups:
        if begin < first + count and first < begin + group.count and group.device not in kinds:
            kinds.append(group.device)
        begin += group.count
    return tuple(kinds)


def part_of(groups: Sequence[Group], count: int) -> tuple[Group, ...]:
    """The groups of the first ``count`` ranks."""
    parts, left = list[Group](), count
    for group in groups:
        if left > 0:
            parts.append(replace(group, count=min(group.count, left)))
            left -= group.count
    return tuple(parts)


def least_device(devices: Sequence[Device]) -> Device:
    """What devices that work in step can do: they wait for the slowest, and the smallest limits them. The products are
    those of the device that computes slowest (the geometric mean of its rates of products), with the least peak in each
    dtype; memory is that of the device with the least left; of everything else, the worst.
    """
    if len(devices) == 1:
        return devices[0]
    slowest = min(devices, key=_product_rate(devices))
    smallest = min(devices, key=_usable_bytes)
    dtypes = sorted({name for device in devices for name in device.peak_flops})
    return replace(
        slowest,
        name=" and ".join(device.name for device in devices),
        peak_flops={name: min(_peak(device, name) for device in devices) for name in dtypes},
        memory_bytes=smallest.memory_bytes,
        reserve_bytes=smallest.reserve_bytes,
        reserve_fraction=smallest.reserve_fraction,
        update_bandwidth=min(device.updates for device in devices),
        **{name: min(getattr(device, name) for device in devices) for name in _LESS_IS_WORSE},
        **{name: max(getattr(device, name) for device in devices) for name in _MORE_IS_WORSE},
    )


def _product_rate(devices: Sequence[Device]) -> Callable[[Device], float]:
    dtypes = sorted({name for device in devices for name in device.peak_flops})

    def rate(device: Device) -> float:
        reached = device.matmul_efficiency * device.sustained
        return sum(math.log(_peak(device, n) * reached * device.dtype_efficiency.get(n, 1.0)) for n in dtypes)

    return rate


def _peak(device: Device, dtype: str) -> float:
    return device.peak_flops.get(dtype, min(device.peak_flops.values()))


def _usable_bytes(device: Device) -> float:
    return device.memory_bytes - device.reserve_bytes - device.reserve_fraction * device.memory_bytes
