"""Description of the hardware a plan is priced for: one kind of device, and the links between devices.

A cluster is a table of numbers with a source, written as TOML (:meth:`Cluster.to_toml`) or chosen by name
(:meth:`Cluster.get`). Adding hardware is adding a table: :mod:`autopar.presets` holds the same text a user
would write.

Devices are numbered so that neighbours are close: ranks ``0 .. size-1`` share the first (innermost) link, and
so on outward. A mesh is laid over them row-major, so its last axis runs over the fastest links.

Invariants (checked on construction, :class:`~autopar.errors.OptionsError`): every rate is positive; link
sizes grow, each a multiple of the one before; only the outermost link may be without a size.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from .cache_folder import cache_folder
from .errors import OptionsError
from .graph import DTYPE_NAMES
from .presets import PRESETS
from .program import COLLECTIVES

_T = TypeVar("_T")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise OptionsError(message)


@dataclass(frozen=True, slots=True)
class Rate:
    """A straight line of the alpha-beta model: a collective takes ``latency`` seconds per step plus its
    traffic over ``bandwidth`` (bytes per second, per device and direction).

    Steps and traffic are defined in :mod:`autopar.cost.collective`. With ``growth`` above 1 the latency grows
    faster than the logarithm of the group: processes that share cores wait for each other's time slices.
    """

    latency: float
    bandwidth: float
    growth: float = 1.0

    def __post_init__(self) -> None:
        _require(
            self.latency >= 0 and math.isfinite(self.latency),
            f"latency {self.latency!r} is not a time in seconds",
        )
        _require(self.bandwidth > 0, f"bandwidth {self.bandwidth!r} is not a positive number of bytes per second")
        _require(self.growth > 0, f"growth {self.growth!r} of a latency is not positive")


@dataclass(frozen=True)
class Link:
    """One level of the network: groups of ``size`` consecutive devices (counted in all, inner levels
    included; None: any number) in which each device sends ``bandwidth`` bytes per second in each direction, a
    step taking ``latency`` seconds.

    ``rates`` says so for kinds of collective that differ (``all_gather`` on gloo). A kind may have several
    rates: its price is the largest of the lines, which bends upward where large messages fall out of a cache.
    """

    name: str
    size: int | None
    bandwidth: float
    latency: float
    rates: Mapping[str, tuple[Rate, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(
            self.size is None or self.size > 0,
            f"link {self.name!r}: size {self.size!r} is not a number of devices",
        )
        _require(self.bandwidth > 0, f"link {self.name!r}: bandwidth {self.bandwidth!r} is not positive (bytes/s)")
        _require(self.latency >= 0, f"link {self.name!r}: latency {self.latency!r} is negative (seconds)")
        for kind, lines in self.rates.items():
            known = ", ".join(COLLECTIVES)
            _require(kind in COLLECTIVES, f"link {self.name!r}: {kind!r} is not a collective; one of {known}")
            _require(len(lines) > 0, f"link {self.name!r}: {kind} has no rate; leave it out to use the link's own")

    def lines(self, kind: str) -> tuple[Rate, ...]:
        """The rates of ``kind``, by default the link's own latency and bandwidth."""
        return self.rates.get(kind) or (Rate(self.latency, self.bandwidth),)


@dataclass(frozen=True)
class Device:
    """One accelerator, or the share of a processor that one process gets.

    Args:
        peak_flops: nominal FLOP/s of matrix products by dtype (``"f32"``, ``"bf16"``, ...); utilisation is
        counted against it. memory_bytes: what a process can allocate; ``reserve_bytes`` and
        ``reserve_fraction`` of it are kept free. memory_bandwidth: sustained bytes per second, reads and
        writes together. launch_seconds, view_seconds: what any operation, and an operation that moves no
        data, costs besides its work. matmul_efficiency: share of the peak a large matrix product reaches.
        matmul_padding: every dim of a matrix product takes the time of one this much longer (tiles partly
            filled, pipelines that ramp up), so small ones are slower per FLOP.
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

    def __post_init__(self) -> None:
        rates = {
            "memory_bytes": self.memory_bytes,
            "memory_bandwidth": self.memory_bandwidth,
            **self.peak_flops,
        }
        for name, value in rates.items():
            _require(value > 0, f"device {self.name!r}: {name} is {value!r}, which is not positive")
        for name in ("launch_seconds", "view_seconds", "matmul_padding", "reserve_bytes"):
            value = getattr(self, name)
            _require(value >= 0, f"device {self.name!r}: {name} is {value!r}, which is negative")
        unknown = [name for name in self.peak_flops if name not in {*DTYPE_NAMES.values(), "tf32"}]
        _require(
            not unknown,
            f"device {self.name!r}: peak_flops of unknown dtypes {unknown}; write f32, bf16, f16, ...",
        )
        _require(len(self.peak_flops) > 0, f"device {self.name!r} has no peak_flops; give at least f32")
        _require(0 < self.matmul_efficiency <= 1, f"device {self.name!r}: matmul_efficiency is not in (0, 1]")
        _require(0 <= self.reserve_fraction < 1, f"device {self.name!r}: reserve_fraction is not in [0, 1)")

    @cached_property
    def _rates(self) -> Mapping[torch.dtype, float]:
        slowest = min(self.peak_flops.values())
        return {dtype: self.peak_flops.get(name, slowest) for dtype, name in DTYPE_NAMES.items()}

    def flops(self, dtype: torch.dtype) -> float:
        """Nominal FLOP/s in ``dtype``; a dtype the description leaves out runs at the slowest rate it
        gives."""
        return self._rates[dtype] if dtype in self._rates else min(self.peak_flops.values())


@dataclass(frozen=True)
class Cluster:
    """``links`` innermost first. ``source`` says where the numbers come from and is printed with every plan;
    ``collective_seconds`` is what starting any collective costs; ``synchronisation_seconds`` what it costs on top
    because its members come to it from computing, each at its own time, and the first waits for the last: processes
    that share processors are out of step by time slices. ``measurement`` keeps facts of a calibration (processes,
    threads, fit errors)."""

    name: str
    source: str
    device: Device
    links: tuple[Link, ...]
    collective_seconds: float = 0.0
    measurement: Mapping[str, float] = field(default_factory=dict)
    synchronisation_seconds: float = 0.0

    def __post_init__(self) -> None:
        _require(len(self.links) > 0, f"cluster {self.name!r} has no links; one device needs one link of size 1")
        for name in ("collective_seconds", "synchronisation_seconds"):
            _require(getattr(self, name) >= 0, f"cluster {self.name!r}: {name} is negative")
        for inner, outer in zip(self.links, self.links[1:], strict=False):
            grows = inner.size is not None and (outer.size is None or outer.size % inner.size == 0)
            _require(
                grows,
                f"cluster {self.name!r}: link {outer.name!r} joins {outer.size} devices and {inner.name!r} "
                f"inside it {inner.size}; sizes count all devices joined, each a multiple of the one before",
            )

    # A price is asked for thousands of times with the cluster as part of a cache's key.
    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.source, self.to_toml()))

    def __hash__(self) -> int:
        return self._hash

    @property
    def size(self) -> int | None:
        """How many devices there are, None if any number."""
        return self.links[-1].size

    def __str__(self) -> str:
        return f"{self.name} ({self.source})"

    def to_toml(self) -> str:
        """The description as TOML; :meth:`from_toml` reads it back to an equal cluster."""
        return _dump(_table_of(self))

    @staticmethod
    def from_toml(text: str, where: str = "the cluster description") -> Cluster:
        """The cluster described by ``text``; ``where`` names it in errors. Raises :class:`OptionsError`."""
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise OptionsError(f"{where} is not TOML: {error}") from error
        return _read(Cluster, table, where)

    @staticmethod
    def get(cluster: str | os.PathLike[str] | Cluster) -> Cluster:
        """The cluster itself, the preset of that name, or the one a TOML file describes.

        ``"local"`` is the last calibration of this machine (:func:`local_file`) if there is one, else
        cautious shipped numbers; ``source`` tells which. Raises :class:`OptionsError`.
        """
        if isinstance(cluster, Cluster):
            return cluster
        name = os.fspath(cluster)
        measured = local_file(name)
        if name.startswith("local") and Path(name).name == name and measured.is_file():
            found = Cluster.from_toml(measured.read_text(), str(measured))
            return replace(found, source=f"{found.source}; read from {measured}")
        if name in PRESETS:
            found = Cluster.from_toml(PRESETS[name], f"preset {name!r}")
            return _with_memory_of_this_machine(found) if name == "local" else found
        path = Path(name).expanduser()
        if path.is_file():
            return Cluster.from_toml(path.read_text(), str(path))
        known = ", ".join(sorted(PRESETS))
        raise OptionsError(
            f"no cluster called {name!r} and no such file; known are {known}. To describe your own, run "
            "`autopar calibrate`, or save Cluster.get('dgx-a100-80gb').to_toml() as a .toml file, edit it, "
            "and give its path"
        )


def local_file(name: str = "local") -> Path:
    """Where a calibration of this machine is kept: ``<name>.toml`` in ``$AUTOPAR_CACHE``, by default
    ``~/.cache/autopar``."""
    return cache_folder() / f"{name}.toml"


def machine_memory() -> int:
    """Bytes of memory this machine (or the control group we run in) has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(name).read_text()))
        except (OSError, ValueError):  # no control group, or "max"
            continue
    return total


def _with_memory_of_this_machine(cluster: Cluster) -> Cluster:
    memory = machine_memory() // int(cluster.measurement["processes"])
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory))


def _table_of(value: Any) -> Any:
    """Dataclasses, mappings and tuples as TOML tables and arrays; what is None or empty is left out."""
    if isinstance(value, (Device, Link, Rate, Cluster)):
        found = {field.name: getattr(value, field.name) for field in fields(value)}
        return {k: _table_of(v) for k, v in found.items() if v is not None and v != {}}
    if isinstance(value, Mapping):
        return {str(k): _table_of(v) for k, v in value.items()}
    return [_table_of(item) for item in value] if isinstance(value, tuple) else value


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _dump(table: dict[str, Any], path: str = "") -> str:
    """``table`` as TOML: plain values first, then tables, then arrays of tables."""
    tables = {k: v for k, v in table.items() if isinstance(v, dict)}
    arrays = {k: v for k, v in table.items() if k == "links"}
    text = "".join(f"{_key(k)} = {_inline(v)}\n" for k, v in table.items() if k not in tables and k not in arrays)
    for name, inner in tables.items():
        text += f"\n[{path}{_key(name)}]\n" + _dump(inner, f"{path}{_key(name)}.")
    for name, items in arrays.items():
        text += "".join(f"\n[[{path}{name}]]\n" + _dump(item, f"{path}{name}.") for item in items)
    return text


def _number(value: Any, where: str) -> float:
    _require(isinstance(value, (int, float)) and not isinstance(value, bool), f"{where} is {value!r}, not a number")
    return float(value)


def _whole(value: Any, where: str) -> int:
    _require(isinstance(value, int) and not isinstance(value, bool), f"{where} is {value!r}, not a whole number")
    return int(value)


def _text(value: Any, where: str) -> str:
    _require(isinstance(value, str), f"{where} is {value!r}, not a string")
    return str(value)


def _numbers(value: Any, where: str) -> dict[str, float]:
    _require(isinstance(value, dict), f"{where} is {value!r}, not a table of numbers")
    return {str(k): _number(v, f"{where}.{k}") for k, v in value.items()}


def _read_rates(value: Any, where: str) -> dict[str, tuple[Rate, ...]]:
    _require(isinstance(value, dict), f"{where} is {value!r}, not a table of collectives")
    lines = {k: v if isinstance(v, list) else [v] for k, v in value.items()}
    return {k: tuple(_read(Rate, rate, f"{where}.{k}") for rate in found) for k, found in lines.items()}


def _read_links(value: Any, where: str) -> tuple[Link, ...]:
    _require(isinstance(value, list), f"{where} is not an array of tables; write [[links]], innermost first")
    return tuple(_read(Link, {"size": None, **link}, f"{where}[{index}]") for index, link in enumerate(value))


_READERS: Mapping[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(("name", "source"), _text),
    **dict.fromkeys(("memory_bytes", "reserve_bytes"), _whole),
    **dict.fromkeys(("peak_flops", "measurement"), _numbers),
    "size": lambda value, where: value if value is None else _whole(value, where),
    "rates": _read_rates,
    "links": _read_links,
    "device": lambda value, where: _read(Device, value, where),
}


def _read(cls: type[_T], table: Any, where: str) -> _T:
    """An instance of the dataclass ``cls`` from a TOML table; errors name the key."""
    _require(isinstance(table, dict), f"{where} is {table!r}, not a table")
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    strange = sorted(set(table) - set(known))
    _require(not strange, f"{where} has unknown keys {', '.join(strange)}; known are {', '.join(known)}")
    optional = {name for name, item in known.items() if (item.default, item.default_factory) != (MISSING, MISSING)}
    missing = [name for name in known if name not in table and name not in optional]
    _require(not missing, f"{where} lacks {', '.join(missing)}")
    return cls(**{name: _READERS.get(name, _number)(value, f"{where}: {name}") for name, value in table.items()})
