"""How the replicas of the outermost mesh axis stay together: ``Options(sync=...)``.

``"every-step"`` (the default) sums gradients at every step, and numbers are those of one device. The others change the
numbers, and send less over slow links: each index of the outermost axis is a *replica* that trains on its own rows of
the batch, with an optimizer of its own, and replicas exchange parameters after optimizer steps
(:mod:`autopar.runtime.averaging`, docs/howto/slow-links.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch

from .errors import OptionsError
from .keywords import suggests_fields

EVERY_STEP: Literal["every-step"] = "every-step"
TOPOLOGIES = ("ring", "exponential", "random")
CODECS = ("bf16", "int8")
# The least seconds of ``patience``.
# Chosen: less would be the time of a busy store.
LEAST_PATIENCE = 1.0

Outer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


@suggests_fields
@dataclass(frozen=True)
class TopK:
    """Only this ``fraction`` of the elements of each tensor is sent, those of the largest magnitude (at least one)."""

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not _is_number(self.fraction) or not 0 < self.fraction <= 1:
            raise OptionsError(f"TopK(fraction={self.fraction!r}) is not a fraction in (0, 1]; 0.01 sends 1 %")


@suggests_fields
@dataclass(frozen=True)
class PowerSGD:
    """Matrices are sent as products of ``rank`` columns and rows (Vogels et al. 2019), by torch's own
    ``powerSGD_hook``; vectors and matrices too small to gain are sent whole."""

    rank: int = 4

    def __post_init__(self) -> None:
        _check_count("PowerSGD", "rank", self.rank, 1)


Compression = Literal["bf16", "int8"] | TopK | PowerSGD


@suggests_fields
@dataclass(frozen=True)
class LocalSGD:
    """Every ``every`` optimizer steps the parameters become their mean over the replicas (Stich 2019).

    Args:
        every: optimizer steps between two exchanges of a parameter.
        fragments: into how many parts the parameters are divided, exchanged at different steps, evenly spread.
        delay: optimizer steps for which an exchange goes on while the replica computes (streaming, Douillard et al.
            2025); 0: the replica waits.
        staleness: instead of ``delay``: the result is used at the first step at which it is there, and is waited for
            only after so many steps. Replicas that are late by less hold up no other; numbers depend on timing.
        mix: the part of the replica's own parameters that stays when a result arrives; None: 0 without delay, and 0.5
            with one.
        compression: how the change since the last exchange is sent, with error feedback: what is lost is added to the
            next change. ``"bf16"``, ``"int8"`` (a scale for each shard), :class:`TopK`, :class:`PowerSGD`; None: whole.
        patience: when a replica leaves, the others go on without it, those that this many seconds have been waited for
            in vain included: more than a step, compiling and a checkpoint take. An exchange ends for all replicas
            together, which costs two questions to the store in which the ranks met. None: others leaving is an error.
    """

    every: int
    fragments: int = 1
    delay: int = 0
    staleness: int | None = None
    mix: float | None = None
    compression: Compression | None = None
    patience: float | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        _check_count(name, "every", self.every, 1)
        _check_count(name, "fragments", self.fragments, 1)
        _check_count(name, "delay", self.delay, 0)
        _check_compression(name, self.compression)
        _check_patience(name, self.patience)
        if self.fragments > self.every:
            raise OptionsError(
                f"{name}(every={self.every}, fragments={self.fragments}): each fragment is exchanged once in "
                f"{self.every} steps, at a step of its own; give at most {self.every} fragments"
            )
        if self.staleness is not None:
            _check_count(name, "staleness", self.staleness, 1)
            if self.delay:
                raise OptionsError(f"{name}: delay={self.delay} and staleness={self.staleness} exclude each other")
        if self.latest >= self.every and self.latest:
            field = "staleness" if self.staleness is not None else "delay"
            raise OptionsError(
                f"{name}(every={self.every}, {field}={self.latest}): a fragment's exchange has to end before its next "
                f"begins; give {field}={self.every - 1} at most, or every={self.latest + 1} at least"
            )
        if self.mix is not None and (not _is_number(self.mix) or not 0 <= self.mix < 1):
            raise OptionsError(f"{name}(mix={self.mix!r}) is not a part in [0, 1): at 1, nothing would be exchanged")
        if isinstance(self.compression, PowerSGD) and self.latest:
            raise OptionsError(
                f"{name}: PowerSGD takes turns of sending and computing, which do not go on beside a step: leave out "
                "delay and staleness, or take compression='int8'"
            )

    @property
    def latest(self) -> int:
        """Steps after which the result of an exchange is waited for."""
        return self.delay if self.staleness is None else self.staleness

    @property
    def kept(self) -> float:
        """The part of a replica's own parameters that stays."""
        return self.mix if self.mix is not None else (0.5 if self.latest else 0.0)


def _nesterov() -> Outer:
    """The outer optimizer of DiLoCo (Douillard et al. 2023, table 5)."""
    return partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


@suggests_fields
@dataclass(frozen=True, repr=False)
class DiLoCo(LocalSGD):
    """Every ``every`` optimizer steps the mean change of the replicas' parameters is, negated, the gradient for a step
    of the ``outer`` optimizer from where the last exchange ended (Douillard et al. 2023); with fragments and delay,
    Streaming DiLoCo (2025). The other fields are those of :class:`LocalSGD`.

    Args:
        outer: makes an optimizer of torch's from a list of tensors: a class, or ``functools.partial`` of one. It
            steps on the shards of this rank, so it must treat each element by itself (SGD, Adam, ...). None: SGD with
            Nesterov momentum, ``lr=0.7, momentum=0.9``.
    """

    outer: Outer | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given: object = self.outer
        if given is not None and (not callable(given) or isinstance(given, torch.optim.Optimizer)):
            raise OptionsError(
                f"DiLoCo(outer={self.outer!r}): give what makes an optimizer, such as "
                "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)"
            )

    @property
    def make_outer(self) -> Outer:
        """``outer``, or the default."""
        return self.outer or _nesterov()

    def __repr__(self) -> str:
        # The address of a function differs between ranks, whose options are compared.
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        values = {name: _named(value) if name == "outer" else repr(value) for name, value in own.items()}
        return f"DiLoCo({', '.join(f'{name}={value}' for name, value in values.items())})"


@suggests_fields
@dataclass(frozen=True)
class Gossip:
    """Every ``every`` optimizer steps each replica mixes its parameters with those of neighbours, and no replica waits
    for all others: decentralised parallel SGD (Lian et al. 2017).

    Args:
        topology: ``"ring"``: a third of each, its own and both neighbours' (with two replicas, halves);
            ``"exponential"``: half of its own and half of that of the replica 1, 2, 4, ... before it, in turn (Assran
            et al. 2019); ``"random"``: pairs, drawn anew each time by ``seed``, become their mean.
        compression: of a ring's messages: the change of what neighbours know of a replica, so that what is lost is
            sent later (CHOCO-SGD, Koloskova et al. 2019). ``"bf16"``, ``"int8"`` or :class:`TopK`.
        consensus: the part of the way to the mean of the neighbours that an exchange goes. 1 without compression; with
            :class:`TopK` it has to be small, about its fraction, or parameters diverge.
        patience: as of :class:`LocalSGD`: replicas go on without those that leave, and then wait for all in an
            exchange, not for neighbours alone.
    """

    topology: Literal["ring", "exponential", "random"] = "ring"
    every: int = 1
    compression: Compression | None = None
    consensus: float = 1.0
    seed: int = 0
    patience: float | None = None

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise OptionsError(
                f"Gossip(topology={self.topology!r}) is not known; one of {', '.join(map(repr, TOPOLOGIES))}"
            )
        _check_count("Gossip", "every", self.every, 1)
        _check_count("Gossip", "seed", self.seed, 0)
        _check_compression("Gossip", self.compression)
        _check_patience("Gossip", self.patience)
        if not _is_number(self.consensus) or not 0 < self.consensus <= 1:
            raise OptionsError(f"Gossip(consensus={self.consensus!r}) is not a part in (0, 1]")
        if isinstance(self.compression, PowerSGD):
            raise OptionsError("Gossip: PowerSGD reduces over all replicas; take 'bf16', 'int8' or TopK")
        if self.compression is not None and self.topology != "ring":
            raise OptionsError(
                f"Gossip(topology={self.topology!r}, compression=...): neighbours keep what they were told of each "
                "other, so they have to stay the same: take topology='ring', or leave compression out"
            )


Sync = Literal["every-step"] | LocalSGD | DiLoCo | Gossip


def check_sync(sync: object) -> None:
    """Raises :class:`OptionsError` for what is no way to stay together."""
    if sync == EVERY_STEP or isinstance(sync, (LocalSGD, Gossip)):
        return
    if isinstance(sync, type) and issubclass(sync, (LocalSGD, Gossip)):
        example = "Gossip()" if sync is Gossip else f"{sync.__name__}(every=100)"
        raise OptionsError(f"sync={sync.__name__} is a class: give one of it, autopar.{example}")
    raise OptionsError(
        f"sync={sync!r} is not known: 'every-step', autopar.LocalSGD(every=...), autopar.DiLoCo(every=...) or "
        "autopar.Gossip(...)"
    )


def _named(outer: Outer | None) -> str:
    if outer is None or not isinstance(outer, partial):
        return "None" if outer is None else f"{outer.__module__}.{getattr(outer, '__qualname__', type(outer).__name__)}"
    given = [*map(repr, outer.args), *(f"{name}={value!r}" for name, value in outer.keywords.items())]
    return f"partial({', '.join([_named(outer.func), *given])})"


def _check_compression(owner: str, compression: object) -> None:
    if compression is None or compression in CODECS or isinstance(compression, (TopK, PowerSGD)):
        return
    raise OptionsError(
        f"{owner}(compression={compression!r}) is not known: {', '.join(map(repr, CODECS))}, autopar.TopK(0.01), "
        "autopar.PowerSGD(rank=4), or None"
    )


def _check_patience(owner: str, patience: object) -> None:
    if patience is not None and (not _is_number(patience) or patience < LEAST_PATIENCE):  # type: ignore[operator]
        raise OptionsError(
            f"{owner}(patience={patience!r}) is not a number of seconds from {LEAST_PATIENCE:g} on, or None: a replica "
            "that others wait for so long is left behind, so give more than a step, compiling and a checkpoint take"
        )


def _check_count(owner: str, name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise OptionsError(f"{owner}({name}={value!r}) is not a whole number from {least} on")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
