"""The error for a model that fits nowhere. It says what would make the model fit, with bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from autopar.cluster.description import Cluster
from autopar.errors import InfeasibleError
from autopar.ir.assignment import ParameterPlacement
from autopar.ir.node import SAVED_ACTIVATION, Node
from autopar.optimizers import OPTIMIZERS
from autopar.options import Options
from autopar.placement.formulation import Instance
from autopar.plans.views.quantities import size
from autopar.solver.problem import Group, Ints, host_binds, host_of, memory_of
from autopar.solver.solve import smallest_choices, smallest_search

from .memory_advice import (
    ADVICE,
    LESS_STATE,
    Advice,
    listed,
    offload_more,
    recompute_more,
    single_change,
    twice_the_devices,
)
from .memory_limit import widened
from .request import PlanRequest, asked_mesh


def does_not_fit(request: PlanRequest, instance: Instance, limit: float, fitting: int | None) -> InfeasibleError:
    """The error that ``instance``, of ``request``, has no solution within ``limit`` bytes per device, which
    :func:`infeasible` explains. ``fitting``: bytes per device within which a step is known to fit, if any."""
    _check_host(instance)
    needs = "" if fitting is None else f": that takes {size(fitting)}"
    error = InfeasibleError(f"no plan on mesh {asked_mesh(request)} fits into {size(limit)} per device{needs}")
    error.explain = partial(infeasible, request, instance, limit, fitting)
    return error.needing(fitting)


def infeasible(request: PlanRequest, instance: Instance, limit: float, fitting: int | None = None) -> InfeasibleError:
    """The error for an ``instance``, of ``request``, that has no solution within ``limit`` bytes per device.
    ``fitting``: bytes per device within which a step is known to fit."""
    _check_host(instance)
    choices, is_proven = smallest_search(instance.problem)
    where = f"on mesh {asked_mesh(request)}"
    if choices is None and is_proven:
        return InfeasibleError(f"no plan {where} is possible at all, with any memory limit.")
    if choices is None:
        return InfeasibleError(
            f"no plan {where} that fits into {size(limit)} per device was found within the solver's time, nor one with "
            f"any other limit; this does not prove that there is none. Largest tensors: {_largest(instance)}."
        )
    least = math.ceil(fitting or memory_of(instance.problem, choices))
    advice = [*_advice(instance, choices, least)]
    enough = f"{single_change(advice, limit)}{_not_searched(request)}"
    return InfeasibleError(
        f"no plan {where} fits into {size(limit)} per device. {shortfall(limit, least)} "
        f"Largest tensors: {_largest(instance)}.{ADVICE}{listed(advice)}. {enough}"
    ).needing(least)


def _not_searched(request: PlanRequest) -> str:
    """What may need less than the error names, as a sentence; empty if the options exclude it."""
    options = request.options
    if options.microbatches == 1 or request.loss is None or math.prod(request.mesh) == 1:
        return ""
    parts = "microbatches" if options.stages == 1 else "pipeline stages or microbatches"
    return f" Not searched: smaller limits of plans in {parts}, which may fit into less."


def shortfall(limit: float, least: int) -> str:
    """The smallest limit that was found, and by how many bytes ``limit`` misses it: a sentence."""
    missing = least - int(limit)
    return (
        f"The smallest limit found to fit is {least} bytes ({size(least)}), {missing} ({size(missing)}) more: "
        f"Options(memory_limit={least})."
    )


def _check_host(instance: Instance) -> None:
    least = sum(_least_host_bytes(group) for group in instance.problem.groups)
    check_host(instance.prices.cluster, least, instance.problem.host_limit)


def _least_host_bytes(group: Group) -> float:
    return float(np.where(np.isfinite(group.cost), group.host, np.inf).min())


def check_host(cluster: Cluster, needed: float, usable: float) -> None:
    """Raises :class:`InfeasibleError` if a plan has to put more bytes into host memory (``needed``) than there are
    (``usable``)."""
    if needed > usable:
        raise InfeasibleError(
            f"a step needs {math.ceil(needed)} bytes ({size(needed)}) in host memory, but cluster "
            f"{cluster.name!r} has only {size(usable)} to spare. What would lower it: offload=None, so that only some "
            "of it goes there; zero=1, 2 or 3, so that it is sharded over every axis; twice the devices; an optimizer "
            "with less state."
        )


def _more_host(instance: Instance, least: float) -> Iterator[Advice]:
    """What more host memory would do, if its limit binds."""
    if not host_binds(instance.problem):
        return
    problem = replace(instance.problem, host_limit=math.inf)
    smallest = smallest_choices(problem)
    if smallest is not None and memory_of(problem, smallest) < least:
        instead = (
            f"{size(host_of(problem, smallest))} of the host's memory instead of {size(instance.problem.host_limit)}"
        )
        yield Advice(instead, memory_of(problem, smallest))


def _largest(instance: Instance) -> str:
    """The largest weights and saved activations, equal ones of one module once. Names of operations are the graph's
    own, and mean nothing to a user."""
    counts: Counter[tuple[str, int]] = Counter()
    for node in instance.graph.nodes:
        if node.op in ("param", SAVED_ACTIVATION):
            name = node.target if node.op == "param" else f"activation of {node.module or 'the model itself'}"
            counts[f"{name} {node.type}", int(node.type.bytes)] += 1
    largest = sorted(counts.items(), key=lambda item: -item[0][1])[:5]
    return "; ".join(
        f"{text}, {size(count)}{f' each, {times} of them' if times > 1 else ''}" for (text, count), times in largest
    )


def _wider(instance: Instance) -> Iterator[tuple[str, Options]]:
    """Options that allow what the instance does not."""
    options = Options(
        recompute="none" if instance.recomputable is None else None, offload=None if instance.offload else False
    )
    if instance.recomputable is None:
        yield recompute_more(options)
    device = instance.prices.cluster.device
    if not instance.offload and (device.has_host or device.has_nvme):
        yield offload_more(options)


def _advice(instance: Instance, choices: Ints, fitting: float) -> Iterator[Advice]:
    """Changes that help, with the bytes per device that each of them leads to. ``fitting``: bytes per device that are
    enough without them."""
    groups, chosen = instance.problem.groups, zip(instance.names, choices, strict=True)
    memory = {name: float(groups[i].memory[int(k)]) for i, (name, k) in enumerate(chosen)}
    of_parameters = {name for name in memory if name in instance.graph and instance.graph[name].op == "param"}
    parameters = sum(memory[name] for name in of_parameters)
    # What rests for each sample. Of what operations hold for a time, weights may be most.
    batch = sum(memory[name] for name in memory if name in instance.graph and _is_of_batch(instance.graph[name]))
    least = min(memory_of(instance.problem, choices), fitting)
    for text, options in _wider(instance):
        wide = widened(instance, options)
        smallest = smallest_choices(wide.problem)
        if smallest is not None and memory_of(wide.problem, smallest) < least:
            yield Advice(text, memory_of(wide.problem, smallest))
    yield from _more_host(instance, least)
    if instance.repeats.microbatches == 1:
        yield Advice("half the batch, or microbatches=2", fitting - batch / 2, is_estimate=True)
    yield twice_the_devices(fitting)
    if _has_state(instance, choices):
        yield Advice(f"{LESS_STATE} (weights, gradients and state take {size(parameters)})", None)


def _is_of_batch(node: Node) -> bool:
    return node.op == SAVED_ACTIVATION or (node.is_placeholder and node.op != "param")


def _has_state(instance: Instance, choices: Ints) -> bool:
    """Whether state of the optimizer rests on the device."""
    if not OPTIMIZERS[instance.optimizer]((1,)):
        return False
    offered = (each[int(k)] for each, k in zip(instance.choices, choices, strict=True))
    places = [choice for choice in offered if isinstance(choice, ParameterPlacement)]
    return any(not place.offload for place in places)
