"""A plan: what was chosen, what it costs and why; frozen, without solver or torch model, and equal to its JSON.

Invariants: ``predicted.step_seconds`` is the sum of ``lines``; ``collectives()`` are those of ``lines``; ``Plan.from_json(plan.to_json())``
equals ``plan``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .assignment import Assignment, ParameterPlacement
from .errors import OptionsError
from .program import CollectiveKind
from .spec import Placements, Strategy, parse_placements, short

Status = Literal["optimal", "feasible", "fallback"]
VERSION = 1


@dataclass(frozen=True, slots=True)
class Step:
    """One hop of a reshard: ``kind`` as in :mod:`autopar.program`, over mesh ``axes`` together; ``bytes`` of the full tensor of a group
    (0 for local steps); ``source`` and ``target`` in short form."""

    kind: str
    axes: tuple[int, ...]
    source: str
    target: str
    bytes: int

    @property
    def communicates(self) -> bool:
        return self.bytes > 0


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One priced item of a step, ``seconds`` in all. ``kind``: compute, reshard, weight (gathered for use), gradient, refresh, optimizer.
    ``name`` is the node computed or the value moved."""

    kind: str
    name: str
    module: str
    phase: str
    seconds: float
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """``count`` collectives of one kind, over the same axes, of the same bytes each, for the same reason."""

    kind: CollectiveKind
    axes: tuple[int, ...]
    bytes: int
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of one step and peak bytes of the device that holds most, with their parts. ``mfu`` is FLOPs of the model over what all
    devices could do in the step."""

    step_seconds: float
    compute_seconds: float
    comm_seconds: float
    bubble_seconds: float
    peak_bytes: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    temporary_bytes: int
    input_bytes: int
    mfu: float

    def to_dict(self) -> dict[str, float | int]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True)
class Plan:
    """See the module docstring.

    ``placements`` gives, by path, how each parameter's value lies during a step, and how the output of each module lies;
    ``parameters`` adds where gradients and optimizer state rest. ``strategies`` is the choice for each node of the graph whose
    fingerprint is ``graph_hash``. ``baselines`` are other plans priced alike (None: it does not fit into memory).
    ``alternatives`` lists for each parameter what else was possible and by how many seconds a step would change.
    """

    model: str
    batch: int
    mesh: tuple[int, ...]
    axis_names: tuple[str, ...]
    cluster: str
    cluster_source: str
    status: Status
    objective: float
    bound: float
    gap: float
    solve_seconds: float
    memory_limit: int
    graph_hash: str
    predicted: Predicted
    lines: tuple[PlanLine, ...]
    strategies: Mapping[str, Strategy]
    parameters: Mapping[str, ParameterPlacement]
    outputs: Mapping[str, Placements]
    baselines: Mapping[str, Predicted | None] = field(default_factory=dict)
    alternatives: Mapping[str, tuple[tuple[str, float], ...]] = field(default_factory=dict)
    pinned: Mapping[str, str] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict, compare=False)
    stages: int = 1
    schedule: str | None = None
    microbatches: int = 1

    @property
    def placements(self) -> Mapping[str, Placements]:
        return {**self.outputs, **{path: place.weight for path, place in self.parameters.items()}}

    def assignment(self, names: Mapping[str, str]) -> Assignment:
        """The choice as lowering takes it; ``names`` maps a parameter's path to its node."""
        parameters = {names[path]: place for path, place in self.parameters.items()}
        return Assignment(self.mesh, self.strategies, parameters)

    def collectives(self) -> tuple[PlannedCollective, ...]:
        """Every collective of a step, equal ones counted together."""
        counts = Counter(
            (step.kind, step.axes, step.bytes, line.kind) for line in self.lines for step in line.steps if step.communicates
        )
        return tuple(
            PlannedCollective(kind, axes, size, count, reason)  # type: ignore[arg-type]
            for (kind, axes, size, reason), count in sorted(counts.items())
        )

    def seconds_of(self, *kinds: str) -> float:
        """Seconds of the lines of these kinds."""
        return sum(line.seconds for line in self.lines if line.kind in kinds)

    def __str__(self) -> str:
        from .plan_text import plan_text

        return plan_text(self)

    def to_json(self) -> str:
        """The whole plan as JSON; placements in short form."""
        return json.dumps(_to_dict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan :meth:`to_json` wrote. Raises :class:`~autopar.errors.OptionsError` if it is not one."""
        try:
            return _from_dict(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise OptionsError(f"this is not a plan that autopar {VERSION} wrote: {type(error).__name__}: {error}") from error


def _strategy_text(strategy: Strategy) -> list[Any]:
    return [[short(p) for p in strategy.inputs], [short(p) for p in strategy.outputs], strategy.local]


def _parse_strategy(data: list[Any]) -> Strategy:
    inputs, outputs, local = data
    return Strategy(tuple(map(parse_placements, inputs)), tuple(map(parse_placements, outputs)), local)


def _to_dict(plan: Plan) -> dict[str, Any]:
    data = {name: getattr(plan, name) for name in _PLAIN}
    data |= {"version": VERSION, "predicted": plan.predicted.to_dict()}
    data["lines"] = [
        [
            line.kind,
            line.name,
            line.module,
            line.phase,
            line.seconds,
            [[s.kind, s.axes, s.source, s.target, s.bytes] for s in line.steps],
        ]
        for line in plan.lines
    ]
    table = {strategy: i for i, strategy in enumerate(dict.fromkeys(plan.strategies.values()))}
    data["strategy_table"] = [_strategy_text(strategy) for strategy in table]
    data["strategies"] = {name: table[strategy] for name, strategy in plan.strategies.items()}
    data["parameters"] = {
        path: [short(p.weight), short(p.gradient), short(p.optimizer)] for path, p in plan.parameters.items()
    }
    data["outputs"] = {path: short(p) for path, p in plan.outputs.items()}
    data["baselines"] = {name: p and p.to_dict() for name, p in plan.baselines.items()}
    return data


_PLAIN = (
    "model batch mesh axis_names cluster cluster_source status objective bound gap solve_seconds memory_limit graph_hash "
    "alternatives pinned fallbacks warnings timings stages schedule microbatches"
).split()
_TUPLES = ("mesh", "axis_names", "fallbacks", "warnings")


def _from_dict(data: dict[str, Any]) -> Plan:
    if data["version"] != VERSION:
        raise ValueError(f"version {data['version']}")
    fields: dict[str, Any] = {name: data[name] for name in _PLAIN}
    fields |= {name: tuple(data[name]) for name in _TUPLES}
    fields["alternatives"] = {k: tuple((str(p), float(s)) for p, s in v) for k, v in data["alternatives"].items()}
    table = [_parse_strategy(item) for item in data["strategy_table"]]
    fields["strategies"] = {name: table[i] for name, i in data["strategies"].items()}
    fields["parameters"] = {
        path: ParameterPlacement(*map(parse_placements, places)) for path, places in data["parameters"].items()
    }
    fields["outputs"] = {path: parse_placements(p) for path, p in data["outputs"].items()}
    fields["baselines"] = {name: p and Predicted(**p) for name, p in data["baselines"].items()}
    fields["predicted"] = Predicted(**data["predicted"])
    fields["lines"] = tuple(
        PlanLine(kind, name, module, phase, seconds, tuple(Step(k, tuple(a), s, t, b) for k, a, s, t, b in steps))
        for kind, name, module, phase, seconds, steps in data["lines"]
    )
    return Plan(**fields)
