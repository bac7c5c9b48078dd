"""One kind of device: its rates and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from autopar.ir.node import DTYPE_NAMES
from autopar.keywords import suggests_fields

from .links import is_amount, is_rate, require


@suggests_fields
@dataclass(frozen=True)
class Device:
    """One accelerator, or the share of a processor that one process gets.

    Args:
        peak_flops: nominal FLOP/s of matrix products by dtype (``"f32"``, ``"bf16"``, ...); utilisation is
            counted against it.
        memory_bytes: bytes that a process can allocate; ``reserve_bytes`` and ``reserve_fraction`` of it are kept free.
        memory_bandwidth: sustained bytes per second, reads and writes together.
        launch_seconds, view_seconds: overhead of any operation, and of an operation that moves no data.
        host_seconds: seconds in which the host starts one operation from a program (its interpreter, its bookkeeping of
            gradients); operations that are not started one by one do not wait for it.
        matmul_efficiency: share of the peak that a large matrix product reaches; multiplied by ``dtype_efficiency``
            where a dtype differs.
        matmul_padding: every dim of a matrix product takes the time of a dim this much longer (partly filled tiles,
            pipelines that ramp up), so small products are slower per FLOP.
        memory_stalls: share of an operation's memory traffic (or of its computation, if that takes less) that does not
            overlap the other: 0 for devices that fetch ahead, 1 if a product packs its operands before it computes.
        processors: multiprocessors to which a product's tiles are assigned, in waves; 0: products are not priced by
            tiles but by padding.
        tile_depth: a tile takes the time of an inner dim this many bytes longer (filling the pipeline, writing the
            result).
        tile_border: a tile of a x b loses the shares ``tile_border / a`` and ``tile_border / b`` to fetching its
            operands.
        attention_efficiency: share of the peak that fused attention reaches with wide heads; heads of
            ``attention_width`` reach half of it. 0: attention is priced like a product.
        attention_length: with so many keys attention takes twice the time per FLOP that it takes with very many.
        function_seconds: seconds of one transcendental function (tanh, exp, ...) of one element; 0: negligible.
        update_bandwidth: bytes per second of an optimizer, counted as if it read and wrote each tensor once; less than
            ``memory_bandwidth`` if it passes over tensors several times, operation by operation; 0: the same.
        host_bandwidth: bytes per second each way between the device and its share of host memory while all devices of
            the host use theirs; 0: the host has no memory apart from the device's.
        host_memory_bytes: that share of host memory.
        host_latency: seconds of one transfer between the two, in addition to ``launch_seconds``.
        nvme_read_bandwidth, nvme_write_bandwidth: bytes per second between the device's process and its share of a
            local disk while all devices of the host use theirs; 0: the host has none.
        nvme_latency: seconds of one read or write in addition.
        nvme_bytes: free bytes of that share of the disk.
        masked_attention: rate of fused attention under a mask that is added to its scores, relative to that without
            one, for which there are other kernels.
        grouped_products: rate of products in groups of rows, of blocks of experts, relative to that of plain ones.
        sustained: clock of a long run relative to that of the short runs in which the rates were measured: chips that
            reach their power limit slow down.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    launch_seconds: float
    view_seconds: float = 0.0
    matmul_efficiency: float = 1.0
    matmul_padding: float = 0.0
    reserve_bytes: int = 0
    reserve_fraction: float = 0.0
    processors: int = 0
    tile_depth: float = 0.0
    tile_border: float = 0.0
    attention_efficiency: float = 0.0
    attention_width: float = 0.0
    attention_length: float = 0.0
    masked_attention: float = 1.0
    grouped_products: float = 1.0
    sustained: float = 1.0
    memory_stalls: float = 0.0
    function_seconds: float = 0.0
    update_bandwidth: float = 0.0
    host_bandwidth: float = 0.0
    host_memory_bytes: int = 0
    host_latency: float = 0.0
    nvme_read_bandwidth: float = 0.0
    nvme_write_bandwidth: float = 0.0
    nvme_latency: float = 0.0
    nvme_bytes: int = 0
    host_seconds: float = 0.0
    dtype_efficiency: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        rates = {"memory_bytes": self.memory_bytes, "memory_bandwidth": self.memory_bandwidth, **self.peak_flops}
        for name, value in {**rates, **self.dtype_efficiency}.items():
            require(is_rate(value), f"{where}: {name} is {value!r}, not a positive number")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            require(is_amount(value), f"{where}: {name} is {value!r}, not a number of at least 0")
        for table in ("peak_flops", "dtype_efficiency"):
            unknown = [name for name in getattr(self, table) if name not in {*DTYPE_NAMES.values(), "tf32"}]
            require(not unknown, f"{where}: {table} of unknown dtypes {unknown}; write f32, bf16, f16, ...")
        require(len(self.peak_flops) > 0, f"{where} has no peak_flops; give at least f32")
        require(
            (self.host_bandwidth > 0) == (self.host_memory_bytes > 0),
            f"{where}: host_bandwidth and host_memory_bytes go together; give both or neither",
        )
        disk = [self.nvme_read_bandwidth > 0, self.nvme_write_bandwidth > 0, self.nvme_bytes > 0]
        require(
            all(disk) or not any(disk),
            f"{where}: nvme_read_bandwidth, nvme_write_bandwidth and nvme_bytes go together; give all three or none",
        )
        for name in ("matmul_efficiency", "sustained", "masked_attention", "grouped_products"):
            require(0 < getattr(self, name) <= 1, f"{where}: {name} is not in (0, 1]")
        for name in ("attention_efficiency", "memory_stalls"):
            require(getattr(self, name) <= 1, f"{where}: {name} is not in [0, 1]")
        require(0 <= self.reserve_fraction < 1, f"{where}: reserve_fraction is not in [0, 1)")

    @property
    def updates(self) -> float:
        """Bytes per second of an optimizer."""
        return self.update_bandwidth or self.memory_bandwidth

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU: what has multiprocessors."""
        return self.processors > 0

    @property
    def has_host(self) -> bool:
        """Whether there is host memory, to which tensors can be offloaded."""
        return self.host_memory_bytes > 0

    @property
    def has_nvme(self) -> bool:
        """Whether there is a local disk, to which tensors can be offloaded."""
        return self.nvme_bytes > 0

    def host_transfer(self, count: float) -> float:
        """Seconds in which ``count`` bytes get from the device to host memory, or back."""
        return self.launch_seconds + self.host_latency + count / self.host_bandwidth

    def nvme_read(self, count: float) -> float:
        """Seconds in which ``count`` bytes get from the disk to the process."""
        return self.nvme_latency + count / self.nvme_read_bandwidth

    def nvme_write(self, count: float) -> float:
        """Seconds in which ``count`` bytes get from the process to the disk."""
        return self.nvme_latency + count / self.nvme_write_bandwidth

    @cached_property
    def _rates(self) -> Mapping[torch.dtype, float]:
        slowest = min(self.peak_flops.values())
        return {dtype: self.peak_flops.get(name, slowest) for dtype, name in DTYPE_NAMES.items()}

    def has_rate(self, dtype: torch.dtype) -> bool:
        """Whether the description gives a rate in ``dtype``."""
        return DTYPE_NAMES.get(dtype) in self.peak_flops

    def flops(self, dtype: torch.dtype) -> float:
        """Nominal FLOP/s in ``dtype``. A dtype without a rate runs at the slowest rate of the description."""
        return self._rates[dtype] if dtype in self._rates else min(self.peak_flops.values())

    def matmul_rate(self, dtype: torch.dtype) -> float:
        """FLOP/s in ``dtype`` that a product approaches if all its dims are large."""
        factor = self.dtype_efficiency.get(DTYPE_NAMES.get(dtype, ""), 1.0)
        return self.flops(dtype) * self.matmul_efficiency * factor * self.sustained


_NOT_NEGATIVE = (
    "launch_seconds",
    "view_seconds",
    "matmul_padding",
    "memory_stalls",
    "reserve_bytes",
    "processors",
    "tile_depth",
    "tile_border",
    "attention_efficiency",
    "attention_width",
    "attention_length",
    "masked_attention",
    "grouped_products",
    "function_seconds",
    "update_bandwidth",
    "host_seconds",
    "host_bandwidth",
    "host_memory_bytes",
    "host_latency",
    "nvme_read_bandwidth",
    "nvme_write_bandwidth",
    "nvme_latency",
    "nvme_bytes",
)
