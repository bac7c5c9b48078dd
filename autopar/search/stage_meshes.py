"""How devices divide among pipeline stages: the possible numbers of stages, the meshes inside a stage, and the numbers
of microbatches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.errors import OptionsError


@dataclass(frozen=True, slots=True)
class StageLayout:
    """``stages`` blocks of consecutive devices, each a ``mesh``. ``axes``: for each axis of ``mesh``, the position of
    its axis in the whole mesh. The stages take the outermost part of the whole mesh, where links are slowest."""

    stages: int
    mesh: tuple[int, ...]
    axes: tuple[int, ...]


def layout_for(mesh: tuple[int, ...], stages: int) -> StageLayout | None:
    """The layout with this number of stages, or None if they do not take whole outermost factors of the mesh.

    >>> layout_for((2, 4), 4)
    StageLayout(stages=4, mesh=(2,), axes=(1,))
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


def layouts(mesh: tuple[int, ...], stages: int | None) -> tuple[StageLayout, ...]:
    """Every layout with more than one stage or, if ``stages`` is given, the layout with that number. Raises
    :class:`OptionsError` if there is none."""
    devices = math.prod(mesh)
    counts = range(2, devices + 1) if stages is None else (stages,)
    matching = tuple(layout for count in counts if devices % count == 0 and (layout := layout_for(mesh, count)))
    if stages is not None and not matching:
        works = [n for n in range(1, devices + 1) if devices % n == 0 and layout_for(mesh, n)]
        raise OptionsError(
            f"stages={stages}: the mesh {mesh} of {devices} devices does not divide into {stages} stages along its "
            f"outermost axes; stages={', '.join(map(str, works))} would"
        )
    return matching


def microbatch_counts(batch: int, stages: int, requested: int | None) -> tuple[int, ...]:
    """The numbers of microbatches worth trying: divisors of ``batch`` near 1, 2, 4 and 8 per stage. With fewer, stages
    idle more; with more, each microbatch does less work."""
    if requested is not None:
        return (requested,)
    divisors = [n for n in range(1, batch + 1) if batch % n == 0]
    wanted = [stages * factor for factor in (1, 2, 4, 8)]
    nearest = {min(divisors, key=lambda n, want=want: (abs(n - want), n)) for want in wanted}  # type: ignore[misc]
    return tuple(sorted(nearest))
