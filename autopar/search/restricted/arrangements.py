"""The ways in which a layout lets the devices be arranged: meshes whose axes have a role each.

The axes are, outermost first: pipeline stages, data, experts among data, context, experts among context, tensor.
Degrees that the layout leaves open share the remaining devices: these are two axes, one outside of all others (from
which stages may be taken) and one inside of all but tensor, for every way to divide them into two. Some degrees have to
be known before a program can be formulated, and are tried one after the other: ``data`` where ``microbatch`` is given,
``data`` and ``context`` where ``expert`` is, and ``tensor`` where ``sequence_parallel`` is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from autopar.errors import OptionsError
from autopar.options import Options
from autopar.planner.request import PlanRequest, axes_are_fixed
from autopar.planner.roles.axis_roles import ROLE_NAMES, AxisRole, role_names
from autopar.restriction import Restriction, words_of

from .divides import check_layout_divides

DEGREES = ("pipeline", "data", "context", "tensor")
_OF_PRODUCTS = frozenset(("data", "context", "tensor"))


def arrangements(request: PlanRequest) -> list[PlanRequest]:
    """The requests to solve for ``request``: itself if no layout fixes a degree, otherwise one for each arrangement of
    its devices. Raises :class:`OptionsError` if there is none, with the numbers (:mod:`.nearest` adds those that work).
    """
    restriction = Restriction.of(request.options.layout)
    stages = request.options.stages
    restriction = replace(restriction, pipeline=restriction.pipeline or (None if isinstance(stages, tuple) else stages))
    restricting = (*DEGREES[1:], "expert", "microbatch", "sequence_parallel")
    if all(getattr(restriction, name) is None for name in restricting):
        given = getattr(request.options.layout, "given", ())
        if "pipeline" in given and math.prod(request.mesh) % (restriction.pipeline or 1):
            raise _no_devices(request, restriction)
        return [request]
    check_layout_divides(request, restriction)
    found: dict[object, PlanRequest] = {}
    failure: OptionsError | None = None
    for known in _known_degrees(request, restriction):
        try:
            for arranged in _arranged(request, restriction, known):
                found.setdefault((arranged.mesh, arranged.roles, arranged.options.microbatches), arranged)
        except OptionsError as error:
            failure = failure or error
    fitting = [arranged for arranged in found.values() if _keeps_axes(request, arranged)]
    if not found:
        raise failure or _no_devices(request, restriction)
    if not fitting:
        raise OptionsError(_other_axes(request, next(iter(found.values()))))
    return [_named(request, arranged) for arranged in fitting]


def _known_degrees(request: PlanRequest, restriction: Restriction) -> Iterator[dict[str, int]]:
    """The degrees that are given, with every value of those that have to be known."""
    devices = math.prod(request.mesh)
    given = {name: n for name in DEGREES if (n := getattr(restriction, name)) is not None}
    tried = {"data": restriction.microbatch is not None, "tensor": restriction.sequence_parallel is not None}
    if (restriction.expert or 1) > 1:
        tried |= {"data": True, "context": True}
    names = [name for name, wanted in tried.items() if wanted and name not in given]
    taken = math.prod(given.values())
    if devices % taken:
        raise _no_devices(request, restriction)
    sizes = [n for n in range(1, devices // taken + 1) if devices // taken % n == 0]
    for values in product(sizes, repeat=len(names)):
        known = {**given, **dict(zip(names, values, strict=True))}
        left, rest = divmod(devices, math.prod(known.values()))
        open_degrees = [name for name in DEGREES if name not in known]
        if rest == 0 and (left == 1 or open_degrees):
            if len(open_degrees) == 1:
                known[open_degrees[0]] = left
            yield known


def _arranged(request: PlanRequest, restriction: Restriction, known: Mapping[str, int]) -> Iterator[PlanRequest]:
    """The arrangements with ``known`` degrees. Raises :class:`OptionsError` if experts or the batch do not divide."""
    options = _with_microbatches(request, restriction, known)
    if "pipeline" in known:
        options = replace(options, stages=known["pipeline"])
    left = math.prod(request.mesh) // math.prod(known.values())
    least = 1 if "pipeline" in known or (restriction.interleave or 1) == 1 else 2
    if known.get("pipeline") == 1 and (restriction.interleave or 1) > 1:
        raise OptionsError(
            f"{words_of(request.options.layout)}: chunks of layers take turns on pipeline stages, and no device is "
            "left for a second stage; take interleave=1, or lower another degree"
        )
    for outer in [n for n in range(least, left + 1) if left % n == 0]:
        axes = _Axes(restriction, known, outer, left // outer).axes()
        live = [(role, size) for role, size in axes if size > 1] or [(_free(restriction, known), 1)]
        roles, mesh = zip(*live, strict=True)
        yield replace(request, mesh=mesh, roles=roles, options=options, axis_names=())


@dataclass(frozen=True)
class _Axes:
    """The axes of one arrangement: ``known`` degrees, and ``outer`` x ``inner`` devices whose use is open."""

    restriction: Restriction
    known: Mapping[str, int]
    outer: int
    inner: int

    def axes(self) -> list[tuple[AxisRole, int]]:
        free, known = _free(self.restriction, self.known), self.known
        pipeline = AxisRole("pipeline", frozenset(), frozenset())
        tensor = replace(self._role("tensor"), sequence_parallel=self.restriction.sequence_parallel)
        in_context = math.gcd(self.restriction.expert or 1, known.get("context", 1))
        in_data = (self.restriction.expert or 1) // in_context
        if known.get("data", 1) % in_data:
            raise _experts_apart(self.restriction, known)
        return [
            (pipeline, known.get("pipeline", 1)),
            (free, self.outer),
            (self._role("data"), known.get("data", 1) // in_data),
            (self._expert_role("data"), in_data),
            (self._role("context"), known.get("context", 1) // in_context),
            (self._expert_role("context"), in_context),
            (free, self.inner),
            (tensor, known.get("tensor", 1)),
        ]

    def _role(self, name: str) -> AxisRole:
        experts = {name, "tensor"} if self.restriction.expert is None else {name}
        return AxisRole(name, frozenset((name,)), frozenset(experts))

    def _expert_role(self, name: str) -> AxisRole:
        return AxisRole("expert", frozenset((name,)), frozenset(("tensor",)))


def _free(restriction: Restriction, known: Mapping[str, int]) -> AxisRole:
    """The role of devices that are left to the search: whatever no degree of the layout counts."""
    products = _OF_PRODUCTS.difference(known) | {"none"}
    experts = products | {"tensor"} if restriction.expert is None else products
    return AxisRole("", products, experts)


def _with_microbatches(request: PlanRequest, restriction: Restriction, known: Mapping[str, int]) -> Options:
    """The options, with the number of microbatches if the layout gives their size."""
    batch, data, words = request.batch, known.get("data", 1), words_of(request.options.layout)
    if batch % data:
        raise OptionsError(f"{words}: a batch of {batch} does not divide among {data} data ranks")
    if restriction.microbatch is None:
        return request.options
    count, rest = divmod(batch // data, restriction.microbatch)
    if rest:
        raise OptionsError(
            f"{words}: each of {data} data ranks has {batch // data} of {batch} samples, which do not divide into "
            f"microbatches of {restriction.microbatch}"
        )
    if request.options.microbatches not in (None, count):
        raise OptionsError(
            f"{words}: on {data} data ranks a batch of {batch} is {count} microbatches of "
            f"{restriction.microbatch} samples, but Options(microbatches={request.options.microbatches}) is asked for; "
            "leave one of them out"
        )
    return replace(request.options, microbatches=count)


def _no_devices(request: PlanRequest, restriction: Restriction) -> OptionsError:
    """The error for degrees whose product is not, or does not divide, the number of devices."""
    devices = math.prod(request.mesh)
    given = {name: n for name in DEGREES if (n := getattr(restriction, name)) is not None}
    needed = " x ".join(f"{name}={n}" for name, n in given.items())
    return OptionsError(
        f"{words_of(request.options.layout)}: {needed} = {math.prod(given.values())} devices, but the mesh "
        f"{request.mesh} has {devices} (degrees that are left out are searched)"
    )


def _experts_apart(restriction: Restriction, known: Mapping[str, int]) -> OptionsError:
    return OptionsError(
        f"Layout(expert={restriction.expert}): experts are divided among data x context ranks, here "
        f"{known.get('data', 1)} x {known.get('context', 1)}"
    )


def _keeps_axes(request: PlanRequest, arranged: PlanRequest) -> bool:
    """Whether an arrangement has the axes of the mesh, where these are fixed: by the options, by names that say another
    role than the layout, or by pins."""
    fixed = axes_are_fixed(request)
    names = role_names(arranged.roles, request.axis_names) if len(arranged.roles) == len(request.axis_names) else ()
    known = set(ROLE_NAMES.values())
    if any(name != role and {name, role} <= known for name, role in zip(request.axis_names, names, strict=False)):
        return False
    return not fixed or arranged.mesh == tuple(n for n in request.mesh if n > 1) or math.prod(request.mesh) == 1


def _other_axes(request: PlanRequest, arranged: PlanRequest) -> str:
    names = role_names(arranged.roles, ("",) * len(arranged.mesh))
    needed = ", ".join(f"{name} {size}".strip() for name, size in zip(names, arranged.mesh, strict=True))
    if request.axis_names:
        why = f" called {request.axis_names}"
    else:
        why = " and pins refer to its axes" if request.options.pins else " and mesh_search=False"
    return (
        f"{words_of(request.options.layout)} needs axes ({needed}), outermost first, but the mesh is "
        f"{request.mesh}{why}: give the mesh {arranged.mesh}, or a shape without names or pins, which may be regrouped"
    )


def _named(request: PlanRequest, arranged: PlanRequest) -> PlanRequest:
    names = tuple(name for name, size in zip(request.axis_names, request.mesh, strict=False) if size > 1)
    return replace(arranged, axis_names=names if len(names) == len(arranged.mesh) else ())
