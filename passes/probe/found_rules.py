"""Strategies of operations without a written rule: those that users registered with DTensor, those that DTensor
proposes, and those found by probing. All are executed before they are used.

An unknown operation runs in a separate process (:mod:`.sandbox`), since it may do anything. Each kind of call is
studied once, and its strategies are confirmed once per magnitude of its sizes. :data:`KNOWN` caches both for this
process, and can be sent to others, so that all ranks use what one of them found.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from autopar.errors import OperatorError
from autopar.ir.node import Arg, map_arg
from autopar.ir.placements import AxisStrategy
from autopar.passes.rule_language.claims import leaves_none_empty
from autopar.passes.rule_language.registry import OpCall, Operand
from autopar.torch_internals.operators import OpOverload, is_mutable, schema_of

from .dtensor_rules import dtensor_strategies, is_registered
from .operator_study import Unfit, learn, numbers_in
from .probe import Proven, check, confirm, fits, probe
from .rule_cache import Finding, describe, key_of, load, parse_strategy, store
from .sandbox import CPU_SECONDS, run_apart
from .trials import Range, find_operation

_UNJUDGEABLE = {
    "nondeterministic_seeded": "it draws random numbers",
    "dynamic_output_shape": "the shape of its result depends on values",
    "data_dependent_output": "its result is a number read from a tensor",
    "inplace_view": "it changes the shape of its operand",
}
_UNINITIALISED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
# As _SMALL_NUMBER of probe.py: larger arguments may be sizes.
_LARGE_NUMBER = 4
_PLAIN = (type(None), bool, int, float, str, Operand, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass
class Known:
    """Cache of findings by kind of call, and of which strategies were confirmed for which sizes."""

    findings: dict[str, Finding] = field(default_factory=dict)
    confirmed: dict[tuple[Any, ...], tuple[bool, ...]] = field(default_factory=dict)

    def adopt(self, other: Known) -> None:
        """Adds the findings of another process."""
        self.findings.update(other.findings)
        self.confirmed.update(other.confirmed)

    def clear(self) -> None:
        """Drops all findings, so that they are found again, or read from disk."""
        self.findings.clear()
        self.confirmed.clear()


KNOWN = Known()


def found_strategies(call: OpCall) -> tuple[AxisStrategy, ...]:
    """The strategies of one axis of ``call.size`` devices for an operation without a written rule. Raises
    :class:`OperatorError` for an operation that would behave differently on several devices."""
    return _found(call)[0]


def source(call: OpCall) -> str:
    """Where the strategies come from, in words; starts with ``fallback`` if there are none."""
    return _found(call)[1]


def refuted(call: OpCall) -> tuple[str, ...]:
    """Registered strategies that execution contradicts."""
    operation = find_operation(call.op)
    return () if _unfit(call, operation) else _finding(call, operation).refuted


def _found(call: OpCall) -> tuple[tuple[AxisStrategy, ...], str]:
    operation = find_operation(call.op)
    reason = _unfit(call, operation)
    if reason:
        return (), f"fallback: {reason}"
    finding = _finding(call, operation)
    if finding.harmful:
        raise OperatorError(_harm(call.op, finding.reason))
    offered = tuple(p for p in finding.strategies if fits(call, p) and leaves_none_empty(call, p.strategy))
    confirmed = offered if finding.source == "trusted" else _confirmed(call, operation, finding, offered)
    return tuple(p.strategy for p in confirmed), _source(finding, bool(offered), bool(confirmed))


def _source(finding: Finding, offered: bool, confirmed: bool) -> str:
    if not finding.strategies:
        return f"fallback: {finding.reason or f'no way to divide it held in {finding.cases} cases'}"
    if not confirmed:
        why = "what held for small sizes does not for these" if offered else "these sizes do not divide"
        return f"fallback: {why}"
    if finding.source == "trusted":
        return f"registered, not proven: {finding.reason}"
    return f"{finding.source} ({finding.cases} cases)"


def _harm(op: str, reason: str) -> str:
    remedy = (
        "tag it: torch.library.custom_op(..., tags=[torch.Tag.nondeterministic_seeded])"
        if "random" in reason
        else "declare it in mutates_args, or let it write into a copy"
    )
    return f"{op} cannot run on several devices: {reason}. Smallest change that works: {remedy}"


def _unfit(call: OpCall, operation: Any) -> str:
    """Why the operation cannot be tried; empty if it can."""
    if not isinstance(operation, OpOverload):
        return "it is no operation of torch"
    for tag, reason in _UNJUDGEABLE.items():
        if tag in {t.name for t in operation.tags}:
            return reason
    if is_mutable(operation):
        return "it writes into its operands"
    if operation.name().split("::")[1].split(".")[0] in _UNINITIALISED:
        return "its result is uninitialised"
    if not call.inputs or not any(t is not None for t in call.outputs):
        return "it takes or gives no tensor"
    strange = _strange(call)
    return f"it takes {strange}" if strange else ""


def _strange(call: OpCall) -> str:
    """An argument that cannot be generated or compared, such as a generator or an object of a type of its own; empty if
    there is none."""
    strange: list[str] = []

    def look(arg: Arg) -> Arg:
        if not isinstance(arg, _PLAIN):
            strange.append(f"a {type(arg).__name__}")
        return arg

    map_arg((call.args, tuple(arg for _, arg in call.kwargs)), look)
    return strange[0] if strange else ""


def _finding(call: OpCall, operation: Any) -> Finding:
    description = describe(call, str(schema_of(operation)))
    claims: tuple[AxisStrategy, ...] = ()
    if is_registered(call.op):
        # Registered rules may change from one run to the next, and depend on sizes, so they are not kept on disk.
        claims = dtensor_strategies(call)
        description |= {"registered": list(map(str, claims)), "devices": call.size}
    key = key_of(description)
    if key not in KNOWN.findings:
        stored = None if claims else load(description, call)
        finding = stored or (_judge(call, claims) if claims else _search(call))
        if stored is None and finding.strategies and not claims:
            store(description, finding)
        KNOWN.findings[key] = finding
    return KNOWN.findings[key]


def _judge(call: OpCall, claims: tuple[AxisStrategy, ...]) -> Finding:
    """Tries the claims that a user registered; if the operation cannot be tried, they are trusted."""
    finding = _study(call, claims, probing=False)
    if finding.reason and not finding.harmful:
        return Finding("trusted", tuple(Proven(c, False) for c in claims), reason=finding.reason)
    true = {p.strategy for p in finding.strategies}
    return replace(finding, source="registered", refuted=tuple(str(c) for c in claims if c not in true))


def _search(call: OpCall) -> Finding:
    """The strategies that probing finds, and true claims of DTensor."""
    claims = dtensor_strategies(call)
    finding = _study(call, claims, probing=True)
    confirms = any(p.strategy in claims for p in finding.strategies)
    return replace(finding, source="DTensor" if confirms else "probed")


def _study(call: OpCall, claims: tuple[AxisStrategy, ...], probing: bool) -> Finding:
    """Studies a call in a separate process. If that crashes, does not end, or finds nothing, it runs once more, with
    dims tied as in the call and small integers: an operation that does not compare the sizes of its operands reads
    beyond their ends if only one of them is resized. If that fails too, there is no finding."""
    outcome = run_apart(partial(_report, call, claims, probing, cautious=False))
    if outcome.crash or outcome.late or (probing and _is_empty(outcome.value)):
        again = run_apart(partial(_report, call, claims, probing, cautious=True), CPU_SECONDS // 2)
        outcome = again if again.value or outcome.value is None else outcome
    report = outcome.value or {"reason": outcome.failure, "harmful": False}
    if "reason" in report:
        return Finding("none", reason=report["reason"], harmful=report["harmful"])
    strategies = tuple(Proven(parse_strategy(text), even) for text, even in report["strategies"])
    ranges = {int(i): Range(low, high, of and tuple(of)) for i, (low, high, of) in report["ranges"].items()}
    return Finding("probed", strategies, report["cases"], ranges)


def _is_empty(report: dict[str, Any] | None) -> bool:
    """Whether an operation could be tried, but no strategy was found."""
    return report is not None and "reason" not in report and not report["strategies"]


def _report(call: OpCall, claims: tuple[AxisStrategy, ...], probing: bool, cautious: bool) -> dict[str, Any]:
    """Runs in the separate process: the report that :func:`_study` reads."""
    operation = _registered(call.op)
    with _plain_surroundings():
        try:
            operator = learn(call, operation, cautious)
        except Unfit as error:
            return {"reason": str(error), "harmful": error.harmful}
        probed, cases = probe(operator) if probing else ([], 0)
        strategies = {p.strategy for p in probed}
        claimed, tried = check(operator, [c for c in claims if c not in strategies])
    return {
        "strategies": [[str(p.strategy), p.even] for p in (*probed, *claimed)],
        "ranges": {i: [r.low, r.high, r.of] for i, r in operator.ranges.items()},
        "cases": cases + tried,
    }


def _confirmed(call: OpCall, operation: Any, finding: Finding, offered: Sequence[Proven]) -> tuple[Proven, ...]:
    """The strategies of ``offered`` that also hold at the sizes of the call, or at others of their magnitude."""
    if not offered:
        return ()
    claims = [p.strategy for p in offered]
    kind = key_of(describe(call, str(schema_of(operation))))
    key = (kind, call.size, _magnitude(call), tuple(map(str, claims)))
    if key not in KNOWN.confirmed:
        outcome = run_apart(partial(_confirm_plainly, call, claims, finding))
        KNOWN.confirmed[key] = tuple(outcome.value or [False] * len(claims))
    return tuple(p for p, holds in zip(offered, KNOWN.confirmed[key], strict=True) if holds)


def _registered(op: str) -> Any:
    """The operation. Raises :class:`OperatorError` if the separate process does not have it."""
    operation = find_operation(op)
    if not isinstance(operation, OpOverload):
        raise OperatorError(
            f"{op} is not registered in another process, where it is tried. Smallest change that works: register it in "
            "a module that can be imported"
        )
    return operation


def _confirm_plainly(call: OpCall, claims: Sequence[AxisStrategy], finding: Finding) -> list[bool]:
    operation = _registered(call.op)
    with _plain_surroundings():
        return confirm(call, operation, claims, dict(finding.ranges))


def _magnitude(call: OpCall) -> tuple[Any, ...]:
    """The sizes, rounded to a factor of two unless an argument may refer to them."""
    exact = max(numbers_in(call), default=0) > _LARGE_NUMBER
    return tuple(tuple(int(n) if exact else int(n).bit_length() for n in t.shape) for t in call.inputs)


@contextmanager
def _plain_surroundings() -> Iterator[None]:
    """Resets device, precision and warning filters, so that the caller's do not affect the findings."""
    with warnings.catch_warnings(), torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.no_grad():
        warnings.simplefilter("ignore")
        yield
