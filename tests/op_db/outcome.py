"""What becomes of one call: equal to eager on one device and on shards, refused, wrong or a crash."""

from __future__ import annotations

import signal
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.passes.annotate.annotate import annotate, rule_sources
from autopar.passes.normalise.standard import normalise
from autopar.planner.step_graphs import step_graph
from autopar.trace.tracer import Traced, trace
from tests.helpers.eager_draws import STATE, eager_draws
from tests.helpers.interpret import interpret
from tests.helpers.lowering import plain
from tests.helpers.simulate import World
from tests.zoo.check import prices_for, programs, random_assignment

from .wrapped import OperatorCase

MESHES = ((2, 2), (3,))
SECONDS = 120
Results = dict[tuple[str, str], torch.Tensor | None]


@dataclass(frozen=True)
class Outcome:
    """``kind`` is "equal", "refused" (an error of ours), "wrong", "crash" (any other error) or "invalid" (eager fails
    too); ``where`` is "eager", "trace", "(1,)" or a mesh."""

    name: str
    kind: str
    where: str = ""
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.kind in ("equal", "refused", "invalid")


class Different(Exception):
    """A result that is not eager's."""


class TooLong(Exception):
    """A call that takes more of the processor's time than it has."""


@contextmanager
def _in_time(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLong(f"more than {seconds} s of the processor")

    # The time of this process, so that a busy machine fails nothing.
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def outcome_of(
    case: OperatorCase, meshes: tuple[tuple[int, ...], ...] = MESHES, seeds: range = range(1), seconds: int = SECONDS
) -> Outcome:
    """Runs the call eagerly, as a graph and on shards, in at most ``seconds``."""
    where = ["eager"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _in_time(seconds):
                _check(case, meshes, seeds, where)
        except AutoparError as error:
            return Outcome(case.name, "refused", where[0], f"{type(error).__name__}: {error}")
        except Different as error:
            return Outcome(case.name, "wrong", where[0], str(error))
        except Exception as error:
            said = "".join(traceback.format_exception(error)[-8:])
            return Outcome(case.name, "invalid" if where[0] == "eager" else "crash", where[0], said)
    return Outcome(case.name, "equal")


def _check(case: OperatorCase, meshes: tuple[tuple[int, ...], ...], seeds: range, where: list[str]) -> None:
    torch.manual_seed(0)
    outputs = eager_outputs(case)
    tangents = {name: _tangent(out) for name, out in outputs.items() if out.requires_grad}
    expected = _eager(case, outputs, tangents)
    where[0] = "trace"
    torch.manual_seed(0)
    traced = trace(case.model, case.inputs, device="cpu", differentiate="all")
    batch = next(iter(dict(traced.graph.symbols).values()), 0)
    where[0] = "(1,)"
    graph = step_graph(normalise(traced.graph), None, batch)
    values = _values(case, traced)
    _compare(interpret(plain(graph), values, tangents), expected)
    rule_sources(graph, (1,))
    for mesh in meshes:
        where[0] = str(mesh)
        annotated = annotate(graph, mesh)
        prices = prices_for(annotated, mesh)
        for seed in seeds:
            assignment = random_assignment(annotated, mesh, seed)
            results, gradients = World(programs(annotated, assignment, prices)).step(values, tangents)
            _compare(_keyed(expected, results, gradients), expected)


def eager_outputs(case: OperatorCase) -> dict[str, torch.Tensor]:
    """The tensors that the model returns, by name."""
    with eager_draws():
        leaves = pytree.tree_leaves(case.model(*[x.clone() for x in case.inputs]))
    return {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}


def _tangent(output: torch.Tensor) -> torch.Tensor:
    return torch.randn(output.shape, dtype=output.dtype)


def _eager(case: OperatorCase, outputs: Mapping[str, torch.Tensor], tangents: Mapping[str, torch.Tensor]) -> Results:
    expected: Results = {("output", name): out.detach().clone() for name, out in outputs.items()}
    learning = dict(case.model.named_parameters())
    if tangents and learning:
        ends = [outputs[name] for name in tangents]
        given = list(learning.values())
        found = torch.autograd.grad(ends, given, list(tangents.values()), allow_unused=True)
        expected |= {("gradient", name): value for name, value in zip(learning, found, strict=True)}
    return expected


def _values(case: OperatorCase, traced: Traced) -> dict[str, torch.Tensor]:
    model = case.model
    values = {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    names = [name for name in traced.signature.input_names if name is not None]
    return {**values, **dict(zip(names, case.inputs, strict=True)), "random": STATE}


def _keyed(expected: Results, results: Mapping[str, Any], gradients: Mapping[str, Any]) -> Results:
    return {key: (gradients if key[0] == "gradient" else results).get(key[1]) for key in expected}


_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def _compare(found: Mapping[tuple[str, str], torch.Tensor | None], expected: Results) -> None:
    for key, value in expected.items():
        other = found.get(key)
        name = " ".join(key)
        if value is None or other is None:
            # What nothing depends on has no gradient, or one of zeros.
            rest = other if value is None else value
            if rest is not None and (key[0] == "output" or bool(rest.any())):
                raise Different(f"{name}: {other} instead of {value}")
            continue
        if other.shape != value.shape or other.dtype != value.dtype:
            raise Different(f"{name}: {other.dtype}{list(other.shape)} instead of {value.dtype}{list(value.shape)}")
        _compare_values(name, other, value)


def _compare_values(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if not (expected.is_floating_point() or expected.is_complex()):
        if not torch.equal(found, expected):
            raise Different(f"{name}: {found} instead of {expected}"[:300])
        return
    tolerance = _TOLERANCE[expected.dtype.to_real() if expected.is_complex() else expected.dtype]
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = found.to(wide), expected.to(wide)
    finite = b.abs()[torch.isfinite(b)]
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    if not torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
        raise Different(f"{name}: {found.flatten()[:6].tolist()} instead of {expected.flatten()[:6].tolist()}")


def steps(graph: Graph) -> int:
    """How many operations a graph has."""
    return sum(not node.is_placeholder for node in graph.nodes)
