"""Description of the hardware that a plan is priced for: its devices, of one kind or of several, and the links between
them.

A cluster is a table of numbers with a source, written as TOML (:meth:`Cluster.to_toml`) or chosen by name
(:meth:`Cluster.get`). To add hardware, add a table: :mod:`autopar.cluster.presets` holds the same text that a user
would write.

Devices are numbered so that neighbours are close: ranks ``0 .. size-1`` share the first (innermost) link, and so on
outward. The devices of a mesh are numbered row-major, so its last axis uses the fastest links. Of devices of several
kinds (:class:`Group`), each group has the ranks after those of the group before.

Invariants (checked on construction, :class:`~autopar.errors.OptionsError`): every rate is positive; link sizes grow,
each a multiple of the one before; only the outermost link may have no size; groups have as many devices as it joins.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from autopar.content.cache_folder import cache_folder
from autopar.errors import OptionsError
from autopar.files import exists, is_url, read_text
from autopar.keywords import suggests_fields

from .device import Device
from .groups import Group, devices_of, least_device, part_of
from .links import ALGORITHMS, Link, Rate, is_amount, require
from .presets import PRESETS
from .toml import dump, read, table_of
from .units import check_units

__all__ = ["Cluster", "Device", "Group", "Link", "Rate", "local_file", "machine_memory"]


BACKENDS = ("nccl", "gloo")
# Stands for a device that was left out.
_NO_DEVICE = Device("not given", {"f32": 1.0}, 1, 1.0, 0.0)


@suggests_fields
@dataclass(frozen=True)
class Cluster:
    """Devices, and the links between them.

    Args:
        source: where the numbers come from; printed with every plan.
        device: the one kind of device. Of ``groups`` it is left out, and is then what they can do in step: the rates
            of the slowest, the memory of the smallest (:func:`~autopar.cluster.groups.least_device`).
        links: innermost first.
        collective_seconds: seconds to start any collective.
        measurement: facts of a calibration (processes, threads, fit errors).
        synchronisation_seconds: additional seconds of a collective because its members finish computing at different
            times, and the first waits for the last: processes that share processors are out of step by time slices.
        algorithms: the algorithms of the collective library (:mod:`autopar.cost.collective.algorithms`); if none are
            named, a hierarchical algorithm with logarithmically many steps is assumed.
        overlaps: whether messages are sent while the device computes, without slowing it down: true of adapters that
            fetch from memory themselves, false of processes that send with the cores on which they compute.
        sharing, cores: ``sharing`` consecutive devices share the processors of a host, which can serve ``cores``
            devices at full speed at once. The rates of ``device`` are those with all devices at work.
        backend: the library that sends messages; its buffers count as memory.
        groups: the devices in the order of their ranks, if there are several kinds.
        expert_imbalance: the rows of the busiest of the devices that share the experts of a block, relative to their
            mean: 1 if all experts are chosen equally often. A matter of a model's router;
            :class:`autopar.Options` state it.
    """

    name: str
    source: str
    device: Device = _NO_DEVICE
    links: tuple[Link, ...] = ()
    collective_seconds: float = 0.0
    measurement: Mapping[str, float] = field(default_factory=dict)
    synchronisation_seconds: float = 0.0
    algorithms: tuple[str, ...] = ()
    overlaps: bool = False
    sharing: int = 1
    cores: float = 1.0
    backend: str = "nccl"
    groups: tuple[Group, ...] = ()
    expert_imbalance: float = 1.0

    def __post_init__(self) -> None:
        self._check_groups()
        require(len(self.links) > 0, f"cluster {self.name!r} has no links; one device needs one link of size 1")
        for name in ("collective_seconds", "synchronisation_seconds"):
            value = getattr(self, name)
            require(is_amount(value), f"cluster {self.name!r}: {name} {value!r} is not a number of seconds")
        require(
            is_amount(self.expert_imbalance) and self.expert_imbalance >= 1,
            f"cluster {self.name!r}: expert_imbalance {self.expert_imbalance!r} is not a number of at least 1",
        )
        require(self.backend in BACKENDS, f"cluster {self.name!r}: backend {self.backend!r} is not of {BACKENDS}")
        algorithms = ", ".join(ALGORITHMS)
        for name in self.algorithms:
            require(name in ALGORITHMS, f"cluster {self.name!r}: {name!r} is not an algorithm; one of {algorithms}")
        require(
            0 < self.cores <= self.sharing,
            f"cluster {self.name!r}: cores {self.cores!r} is not above 0 and at most sharing {self.sharing!r}, the "
            "number of devices that share them",
        )
        for inner, outer in zip(self.links, self.links[1:], strict=False):
            require(
                inner.size is not None,
                f"cluster {self.name!r}: link {inner.name!r} has no size, so it joins any number of devices, and no "
                f"link can lie outside it, as {outer.name!r} does; give it a size",
            )
            require(
                outer.size is None or outer.size % (inner.size or 1) == 0,
                f"cluster {self.name!r}: link {outer.name!r} joins {outer.size} devices and {inner.name!r} "
                f"inside it {inner.size}; sizes count all devices joined, each a multiple of the one before",
            )

        self._check_toruses()

    def _check_groups(self) -> None:
        """Checks that there is a device, or sets that of the groups."""
        if not self.groups:
            given = self.device is not _NO_DEVICE
            require(given, f"cluster {self.name!r} has no device; give one, or groups of devices of several kinds")
            return
        least = least_device(devices_of(self.groups, 0, self._grouped))
        require(
            self.device in (_NO_DEVICE, least),
            f"cluster {self.name!r} has groups, whose devices in step make its device: leave device out, and use "
            "with_groups(...) for other groups",
        )
        object.__setattr__(self, "device", least)
        for link in self.links[-1:]:
            require(
                link.size in (None, self._grouped),
                f"cluster {self.name!r}: its groups have {self._grouped} devices, and link {link.name!r} joins "
                f"{link.size}; give that link the size {self._grouped}, or none",
            )

    @property
    def _grouped(self) -> int:
        return sum(group.count for group in self.groups)

    def _check_toruses(self) -> None:
        """Checks that each torus has as many places as its level joins blocks."""
        below = 1
        for link in self.links:
            if link.torus:
                places = (link.size or 0) // below
                require(
                    math.prod(link.torus) == places,
                    f"cluster {self.name!r}: link {link.name!r} joins {places} blocks, its torus "
                    f"{' x '.join(map(str, link.torus))} has {math.prod(link.torus)}",
                )
            below = link.size or below

    # The cluster is part of the keys of price caches, which are looked up thousands of times.
    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.source, self.to_toml()))

    def __hash__(self) -> int:
        return self._hash

    @property
    def size(self) -> int | None:
        """The number of devices; None if any number is possible."""
        return self._grouped if self.groups else self.links[-1].size

    def at(self, first: int, count: int) -> Cluster:
        """The cluster as ``count`` devices from rank ``first`` on, working in step, have it: of one kind, that of the
        slowest and the smallest of them.

        >>> fast, slow = (Cluster.get(name).device for name in ("dgx-h100", "dgx-a100-80gb"))
        >>> mixed = Cluster.get("dgx-h100").with_groups(Group(8, fast), Group(8, slow))
        >>> [mixed.at(first, 8).device.name for first in (0, 8)] + [mixed.at(4, 8).device.name]
        ['H100-SXM5-80GB', 'A100-SXM4-80GB', 'H100-SXM5-80GB and A100-SXM4-80GB']
        """
        if not self.groups:
            return self
        known = self._parts.get((first, count))
        if known is None:
            device = least_device(devices_of(self.groups, first, count))
            known = self._parts[first, count] = replace(self, device=device, groups=())
        return known

    @cached_property
    def _parts(self) -> dict[tuple[int, int], Cluster]:
        return {}

    def among(self, devices: int) -> Cluster:
        """The first ``devices`` devices where there are several kinds, so that none counts that is not used; its source
        says so. Raises :class:`OptionsError` if there are fewer."""
        if not self.groups or devices == self.size:
            return self
        require(devices < self._grouped, f"cluster {self.name!r} has {self._grouped} devices, not {devices}")
        links = (*self.links[:-1], replace(self.links[-1], size=None, torus=()))
        source = f"{self.source}; the first {devices} of its {self._grouped} devices"
        return replace(self, source=source, device=_NO_DEVICE, links=links, groups=part_of(self.groups, devices))

    def with_groups(self, *groups: Group) -> Cluster:
        """The same links between other devices. The outermost link joins all of them."""
        outer = self.links[-1]
        size = None if outer.size is None else sum(group.count for group in groups)
        links = (*self.links[:-1], replace(outer, size=size))
        return replace(self, device=_NO_DEVICE, groups=groups, links=links)

    def __str__(self) -> str:
        return f"{self.name} ({self.source})"

    def speed(self, computing: int) -> float:
        """The factor by which each of ``computing`` devices of a host is faster than the rates of ``device``, while the
        host's other devices wait.

        >>> [Cluster.get("dgx-a100-80gb").speed(k) for k in (1, 8)]
        [1.0, 1.0]
        """
        return min(self.sharing / self.cores, max(1.0, self.sharing / computing))

    def with_node(self, devices: int) -> Cluster:
        """The same hardware with another number of ``devices`` in each node (the devices that the innermost link
        joins). The number of adapters per node stays, or stays one per device. Raises :class:`OptionsError` if outer
        levels cannot be built from such nodes."""
        inner, *outer = self.links
        if inner.torus:
            raise OptionsError(f"cluster {self.name!r}: the innermost link is a torus, which has no nodes to resize")
        return replace(self, links=(replace(inner, size=devices), *outer))

    def of_devices(self, devices: int) -> Cluster:
        """The same hardware with ``devices`` devices in all. Levels of links beyond them are left out. Raises
        :class:`OptionsError` if the devices do not fill whole blocks of a level, or are more than the cluster has."""
        if self.size is not None and devices > self.size:
            raise OptionsError(f"cluster {self.name!r} has {self.size} devices, not {devices}")
        inner: list[Link] = []
        for link in self.links:
            if link.size is None or link.size >= devices:
                links = (*inner, replace(link, size=devices, torus=_part(link, inner, devices)))
                if self.groups:
                    return replace(self, device=_NO_DEVICE, links=links, groups=part_of(self.groups, devices))
                return replace(self, links=links)
            inner.append(link)
        raise AssertionError("the outermost link joins all devices")

    def to_toml(self) -> str:
        """The description as TOML; :meth:`from_toml` reads it back to an equal cluster."""
        return dump(table_of(self))

    @staticmethod
    def from_toml(text: str, where: str = "the cluster description") -> Cluster:
        """The cluster that ``text`` describes. Errors call it ``where``. Raises :class:`OptionsError`."""
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise OptionsError(f"{where} is not TOML: {error}") from error
        return read(Cluster, table, where)

    @staticmethod
    def get(cluster: str | os.PathLike[str] | Cluster) -> Cluster:
        """The cluster itself, the preset of that name, or the cluster that a TOML file describes: its
        path, or its URL.

        ``"local"`` is the last calibration of this machine (:func:`local_file`) if there is one, otherwise cautious
        shipped numbers; ``source`` says which. Raises :class:`OptionsError`.
        """
        if isinstance(cluster, Cluster):
            return cluster
        is_name = isinstance(cluster, (str, os.PathLike))
        require(is_name, f"{cluster!r} is not a cluster: give a Cluster, a name or a file")
        name = os.fspath(cluster)
        measured = local_file(name)
        if name.startswith("local") and Path(name).name == name and measured.is_file():
            description = Cluster.from_toml(read_text(measured, "the cluster"), str(measured))
            # Files written before backends were recorded describe gloo.
            description = replace(description, backend="gloo") if name == "local" else description
            return replace(description, source=f"{description.source}; read from {measured}")
        if name in PRESETS:
            description = Cluster.from_toml(PRESETS[name], f"preset {name!r}")
            return _with_memory_of_this_machine(description) if name == "local" else description
        if is_url(name) or exists(name):
            description = Cluster.from_toml(read_text(name, "the cluster"), name)
            check_units(description, name)
            return description
        names = ", ".join(sorted(PRESETS))
        raise OptionsError(
            f"no cluster is called {name!r}, and no such file exists; presets are {names}. To describe your own, run "
            "`autopar calibrate`, or save Cluster.get('dgx-a100-80gb').to_toml() as a .toml file, edit it, "
            "and give its path or URL"
        )


def _part(link: Link, inside: list[Link], devices: int) -> tuple[int, ...]:
    """The dims of the part of a torus that joins the first ``devices``."""
    left, dims = devices // ((inside[-1].size or 1) if inside else 1), []
    for dim in link.torus:
        dims.append(math.gcd(dim, left))
        left //= dims[-1]
    if link.torus and left > 1:
        raise OptionsError(f"{devices} devices are not a block of the torus {' x '.join(map(str, link.torus))}")
    return tuple(dims)


def local_file(name: str = "local") -> Path:
    """The file of a calibration of this machine: ``<name>.toml`` in ``$AUTOPAR_CACHE``, by default
    ``~/.cache/autopar``."""
    return cache_folder() / f"{name}.toml"


def machine_memory() -> int:
    """Bytes of memory of this machine, or of the control group in which this process runs."""
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
