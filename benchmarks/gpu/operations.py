"""The part ``ops``: predicted against measured seconds of each kind of operation, in the programs of models.

The program of one device, in bf16, runs operation by operation, each between two events of the device's clock. A
figure is the median over several steps, and the sum over all operations of a name; the prediction is what the planner's
prices (``cost/compute``) say for the same operands. Where the device waits for the processor to launch small
operations, the wait counts, as in a step that is not compiled.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.calibration.default_cluster import default_cluster
from autopar.cluster.description import Cluster
from autopar.cost import node_seconds
from autopar.ir.node import TensorType, Value
from autopar.ir.program import Instruction, Program, Section
from autopar.runtime.state.parameters import local_of
from autopar.torch_internals.trees import tree_leaves
from tests.helpers.eager_draws import STATE
from tests.helpers.simulate import World

from .models import TRAINED, make_batch, make_model
from .setting import Row, Setting

# Steps that are measured, after one that is not. Chosen: enough for a median.
REPEATS = 5
Mark = Callable[[], Any]


def cases(setting: Setting) -> list[str]:
    return list(TRAINED)


def run(case: str, setting: Setting) -> list[Row]:
    """A row for each name of an operation, the slowest first, and one for all."""
    model = make_model(case, setting)
    batch = make_batch(case, setting)
    options = autopar.Options(precision="bf16", compile=False, stages=1, microbatches=1, recompute="none")
    mesh = init_device_mesh(setting.kind, (setting.world,))
    parallel = autopar.parallelize(model, mesh, options=options)
    call: Any = parallel.prepare((), batch, "loss")
    values: dict[str, Any] = {name: local_of(p) for name, p in parallel.named_parameters(remove_duplicate=False)}
    values |= {**dict(parallel.named_buffers()), **batch, "random": STATE}
    timed = Timed(call.program, default_cluster(setting.kind, setting.world), setting)
    timed.step(values)
    timed.seconds.clear()
    for _ in range(REPEATS):
        timed.step(values)
    return _rows(case, timed)


def _rows(case: str, timed: Timed) -> list[Row]:
    by_name: dict[str, Row] = {}
    for key, taken in timed.seconds.items():
        instruction = timed.instructions[key]
        row = by_name.setdefault(instruction.op, {"count": 0, "seconds": 0.0, "predicted_seconds": 0.0})
        row["count"] += 1
        row["seconds"] += statistics.median(taken)
        row["predicted_seconds"] += timed.predicted[key]
    rows = [{"case": f"{case} {name}", **row} for name, row in by_name.items()]
    rows.sort(key=lambda row: -row["seconds"])
    total: Row = {key: sum(row[key] for row in rows) for key in ("count", "seconds", "predicted_seconds")}
    return [{"case": f"{case} all", **total}, *rows]


class Timed(World):  # type: ignore[misc]
    """One device, whose operations are timed: ``seconds`` and ``predicted`` by section and name."""

    def __init__(self, program: Program, cluster: Cluster, setting: Setting) -> None:
        super().__init__([program], setting.device)
        self.setting, self.cluster = setting, cluster
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self.predicted: dict[tuple[str, str], float] = {}
        self.instructions: dict[tuple[str, str], Instruction] = {}

    def step(self, values: Mapping[str, Tensor], tangents: Any = None) -> Any:
        """One step of the program, on whole ``values`` by name."""
        program = self.programs[0]
        working = self.run([program.refresh], [[values[slot.target] for slot in program.parameters]])[0]
        weights = {slot.target: value for slot, value in zip(program.parameters, working, strict=True)}
        outputs = self.run([program.forward], [[self._value(slot, weights, values) for slot in program.placeholders]])
        count = len(program.results)
        ones = [torch.ones(slot.shape, dtype=slot.dtype, device=self.device) for slot in program.tangents]
        saved = [*outputs[0][count:], *ones]
        del outputs
        self.run([program.backward], [saved])

    def _value(self, slot: Any, weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Tensor:
        if slot.kind == "param":
            return weights[slot.target]
        if slot.kind == "constant":
            constant: Tensor = self.programs[0].constants[slot.target].to(self.device)
            return constant
        value: Tensor = values[slot.target]
        return value

    def run(self, sections: Sequence[Section], inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """One section, each value dropped after its last use."""
        section = sections[0]
        known = {Value(name): value for name, value in zip(section.inputs, inputs[0], strict=True)}
        last = {v: i for i, instruction in enumerate(section.instructions) for v in instruction.operands}
        kept = {value for value in section.outputs if value is not None}
        marks = []
        for index, instruction in enumerate(section.instructions):
            begin = self._mark()
            result = self._execute([instruction], [known])[0]
            marks.append((instruction, begin, self._mark()))
            self._predict(section, instruction, known, result)
            several = result if isinstance(result, (tuple, list)) else [result]
            known |= {Value(instruction.name, place): value for place, value in enumerate(several)}
            for value in instruction.operands:
                if last[value] == index and value not in kept:
                    known.pop(value, None)
        self.setting.synchronise()
        for instruction, begin, end in marks:
            self.seconds.setdefault((section.name, instruction.name), []).append(_between(begin, end))
        return [[None if value is None else known[value] for value in section.outputs]]

    def _mark(self) -> Any:
        if self.setting.kind != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _predict(self, section: Section, instruction: Instruction, known: Mapping[Value, Any], result: Any) -> None:
        key = (section.name, instruction.name)
        if key in self.predicted:
            return
        inputs = tuple(_type(known[value]) for value in instruction.operands if isinstance(known[value], Tensor))
        outputs = tuple(_type(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.instructions[key] = instruction
        communicates = instruction.op.startswith("collective.")
        self.predicted[key] = 0.0 if communicates else node_seconds(self.cluster, instruction, inputs, outputs)


def _type(value: Tensor) -> TensorType:
    return TensorType(tuple(value.shape), value.dtype)


def _between(begin: Any, end: Any) -> float:
    """Seconds between two marks."""
    return float(end - begin) if isinstance(begin, float) else begin.elapsed_time(end) / 1e3
