"""How devices divide among pipeline stages: the possible numbers of stages, the meshes inside a stage, and the numbers
of microbatches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.layout import divisors

# The most kinds of neighbouring devices between which unequal stages are searched. Chosen: each multiplies the ways to
# divide them.
MOST_KINDS = 4

# The most divisors of a batch that are all numbers of microbatches to try. Chosen: batches up to 64, or of twelve.
MOST_COUNTS = 8


@dataclass(frozen=True, slots=True)
class StageLayout:
    """``stages`` blocks of consecutive devices, each a ``mesh``. ``axes``: for each axis of ``mesh``, the position of
    its axis in the whole mesh. The stages take the outermost part of the whole mesh, where links are slowest.

    ``counts``: the devices of each block, if they are given one by one, as those of unequal blocks are. The devices of
    a block may form any mesh then; ``mesh`` is that of the largest with one axis."""

    stages: int
    mesh: tuple[int, ...]
    axes: tuple[int, ...]
    counts: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The devices of each block."""
        return self.counts or (math.prod(self.mesh),) * self.stages

    @property
    def is_unequal(self) -> bool:
        return len(set(self.counts)) > 1

    @property
    def blocks(self) -> tuple[range, ...]:
        """The devices of each block, counted over all."""
        ends = itertools.accumulate(self.sizes)
        return tuple(range(end - size, end) for size, end in zip(self.sizes, ends, strict=True))

    @property
    def described(self) -> str:
        """``2 stages``, ``stages of 1 + 3 devices``, or ``no stages`` of a step in microbatches."""
        if self.counts:
            return f"stages of {' + '.join(map(str, self.counts))} devices"
        return f"{self.stages} stages" if self.stages > 1 else "no stages"


def layout_for(mesh: tuple[int, ...], stages: int) -> StageLayout | None:
    """The layout with this number of stages, or None if they do not take whole outermost factors of the mesh.

    >>> layout_for((2, 4), 4)
    StageLayout(stages=4, mesh=(2,), axes=(1,), counts=())
    """
    left, inner, axes = stages, [], []
    for axis, size in enumerate(mesh):
        taken = math.gcd(left, size)
        if left > 1 and taken < size and left != taken:
            return None
        left //= taken
        if size // taken > 1:
            inner.append(size // taken)
            axes.append(axis)
    if left > 1:
        return None
    return StageLayout(stages, tuple(inner) or (1,), tuple(axes) or (len(mesh) - 1,))


def layout_of(mesh: tuple[int, ...], counts: tuple[int, ...]) -> StageLayout:
    """The layout whose stages have so many devices each: an ordinary one, if that has them. Raises
    :class:`OptionsError` if they are not all devices of the mesh."""
    devices = math.prod(mesh)
    if sum(counts) != devices:
        short = devices - sum(counts)
        other = (*counts[:-1], counts[-1] + short)
        works = f"; stages={other} would" if other[-1] > 0 else ""
        raise OptionsError(
            f"stages={counts} are {sum(counts)} devices in all, but the mesh {mesh} has {devices}: they take every "
            f"device{works}"
        )
    alike = layout_for(mesh, len(counts)) if len(set(counts)) == 1 else None
    return alike or StageLayout(len(counts), (max(counts),), (), counts)


def layouts(mesh: tuple[int, ...], stages: int | None, *, others: bool = False) -> tuple[StageLayout, ...]:
    """Every layout with more than one stage, of as many devices each, or, if ``stages`` is given, the layout with that
    number. Raises :class:`OptionsError` if there is none, unless there are ``others``."""
    devices = math.prod(mesh)
    counts = range(2, devices + 1) if stages is None else (stages,)
    matching = tuple(layout for count in counts if devices % count == 0 and (layout := layout_for(mesh, count)))
    if stages is not None and not matching and not others:
        works = [n for n in range(1, devices + 1) if devices % n == 0 and layout_for(mesh, n)]
        raise OptionsError(
            f"stages={stages}: the mesh {mesh} of {devices} devices does not divide into {stages} stages along its "
            f"outermost axes; stages={', '.join(map(str, works))} would, or a number of devices for each stage, as in "
            f"stages={_nearly_equal(devices, stages)}"
        )
    return matching


def _nearly_equal(devices: int, stages: int) -> tuple[int, ...]:
    """Numbers of devices for so many stages; at least two stages, and a device for each."""
    count = max(2, min(stages, devices))
    return tuple(devices // count + (stage >= count - devices % count) for stage in range(count))


def unequal_layouts(cluster: Cluster, devices: int) -> tuple[StageLayout, ...]:
    """Layouts of unequal stages that may pay: between devices of several kinds, of each of which neighbours make one
    stage or several equal ones."""
    kinds = [list(same) for _, same in itertools.groupby(cluster.groups, key=lambda group: group.device)]
    blocks = [sum(group.count for group in same) for same in kinds]
    if sum(blocks) != devices or len(blocks) > MOST_KINDS:
        return ()
    partings = itertools.product(*map(divisors, blocks))
    found = [
        tuple(size for block, parts in zip(blocks, parting, strict=True) for size in [block // parts] * parts)
        for parting in partings
    ]
    unequal = sorted((counts for counts in found if len(set(counts)) > 1), key=lambda counts: (len(counts), counts))
    return tuple(StageLayout(len(counts), (max(counts),), (), counts) for counts in unequal)


def microbatch_counts(batch: int, stages: int, requested: int | None) -> tuple[int, ...]:
    """The numbers of microbatches worth trying: all divisors of ``batch`` if they are few, otherwise those nearest to 1
    and to 1, 2, 4 and 8 per stage, and half, a quarter and so on. With fewer, stages idle more; with more, each
    microbatch does less work, and launches take longer."""
    if requested is not None:
        return (requested,)
    counts = divisors(batch)
    if len(counts) <= MOST_COUNTS:
        return tuple(counts)
    return nearest_counts(batch, [1, *(8 * stages / 2**power for power in range((8 * stages).bit_length()))])


def nearest_counts(batch: int, wanted: Iterable[float]) -> tuple[int, ...]:
    """The divisors of ``batch`` that are nearest to each of the ``wanted`` numbers."""
    counts = divisors(batch)
    return tuple(sorted({min(counts, key=lambda n, want=want: (abs(n - want), n)) for want in wanted}))  # type: ignore[misc]
