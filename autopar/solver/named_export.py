"""Exports the integer program with named rows. While solving, rows have no names."""

from __future__ import annotations

from collections.abc import Iterator

from ortools.math_opt import model_pb2

from .highs import to_proto
from .milp import MixedIntegerProgram, build
from .problem import Problem


def row_names(program: MixedIntegerProgram, problem: Problem) -> Iterator[str]:
    """The names of the rows: ``one_choice[group]``, ``leaves_row[transfer,consumer,row]``, ``enters_column[...]``,
    ``memory``, ``host``, ``temporary[group]``."""
    for family, labels in program.families:
        for label in labels:
            if family in ("one_choice", "temporary"):
                yield f"{family}[{problem.groups[label].name}]"
            elif family == "exposed":
                yield f"{family}[{problem.windows[label].name}]"
            elif family in ("memory", "host"):
                yield family
            else:
                t, c, *ends = (int(v) for v in label)
                transfer = problem.transfers[t]
                consumer = problem.groups[transfer.consumers[c]].name
                yield f"{family}[{transfer.name},{consumer}#{c},{','.join(map(str, ends))}]"


def export(problem: Problem) -> model_pb2.ModelProto:
    """The whole integer program with named rows, for inspection or for another solver."""
    program = build(problem)
    model = to_proto(program, relaxed=False)
    model.linear_constraints.names.extend(row_names(program, problem))
    return model
