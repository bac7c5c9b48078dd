"""The costs of a section of a model under a recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.emulator.sections.section import Seconds, Section, Weight

NOTHING = Seconds()


@dataclass(frozen=True)
class RecipeWeight(Weight):
    """A parameter on one device.

    Attributes:
        cast: whether products read copies in fp8.
        again: recomputations that read it once more in backward: ``"selective"``, ``"elementwise"``, or
            ``"recomputed"`` for modules named by the recipe.
    """

    cast: bool = False
    again: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RecipeSection(Section):
    """One section for one microbatch, on one device.

    Attributes:
        kept: the part of forward that ``recompute="operations"`` does not repeat; it saves ``saved_kept`` bytes for it.
        again: what backward repeats of the modules in :attr:`.Recipe.recomputed`; it then has ``saved_again`` bytes in
            addition to the saved ones.
        hosts: seconds of computing of forward and of backward in which the device waits for the host, which launches
            operations one by one.
    """

    kept: Seconds = NOTHING
    saved_kept: int = 0
    again: Seconds = NOTHING
    saved_again: int = 0
    hosts: tuple[float, float] = (0.0, 0.0)

    @property
    def device_forward(self) -> Seconds:
        """Forward without waiting for the host."""
        return replace(self.forward, compute=self.forward.compute - self.hosts[0])


def of_recipe(section: Section) -> RecipeSection:
    """A section of a recipe, as its pricer makes them."""
    assert isinstance(section, RecipeSection)
    return section


def weight_of_recipe(weight: Weight) -> RecipeWeight:
    """A weight of a recipe's section."""
    assert isinstance(weight, RecipeWeight)
    return weight


def with_host(section: Section, forward: float, backward: float) -> RecipeSection:
    """A section that waits for the host so many seconds more."""
    found = of_recipe(section)
    return replace(
        found,
        forward=replace(found.forward, compute=found.forward.compute + forward),
        backward=replace(found.backward, compute=found.backward.compute + backward),
        hosts=(found.hosts[0] + forward, found.hosts[1] + backward),
    )
