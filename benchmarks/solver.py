"""Synthetic placement problems shaped like transformer layers, and how long :func:`autopar.solver.solve.solve` takes
on them.

    python benchmarks/solver.py [--axes 2] [--layers 2] [--tight 0.5] [--json]

Placements on one axis are R, S(0), S(1), S(2), P; a tensor's placements on the mesh are their products.
Resharding costs are shortest paths over one-axis hops, so they have a zero diagonal and obey the triangle
inequality, as real ones do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.problem import Floats, Group, Ints, Problem, Transfer, memory_of
from autopar.solver.reduce import reduce, size_of
from autopar.solver.solve import smallest_memory, solve

# Price of a hop on one axis, R S(0) S(1) S(2) P down, the same across; 9 is forbidden.
HOP = np.array([[0, 0.01, 0.01, 0.01, 0.02], [1, 0, 1, 1, 9], [1, 1, 0, 1, 9], [1, 1, 1, 0, 9], [2, 1, 1, 1, 0]])


def reshard_cost(axes: int, bandwidth: Floats) -> Floats:
    """[5**axes, 5**axes] shortest-path price of moving 1 unit of bytes between placements."""
    one = np.where(HOP >= 9, np.inf, HOP)
    for r in range(5):
        one = np.minimum(one, one[:, r, None] + one[None, r, :])
    placements = list(itertools.product(range(5), repeat=axes))
    local = np.array([np.prod([1.0 if p in (0, 4) else 1 / 4 for p in q]) for q in placements])
    cost = np.zeros((len(placements),) * 2)
    for a, row in enumerate(placements):
        for b, column in enumerate(placements):
            moved = sum(one[p, q] * w for p, q, w in zip(row, column, bandwidth, strict=True))
            cost[a, b] = moved * max(local[a], local[b])
    for r in range(len(placements)):
        cost = np.minimum(cost, cost[:, r, None] + cost[None, r, :])
    return cost


@dataclass
class Builder:
    """Grows a problem operation by operation; ``tensor[name]`` is (producer group, row per choice, size)."""

    axes: int
    random: np.random.Generator
    metric: Floats
    groups: list[Group] = field(default_factory=list)
    tensors: list[tuple[int, Ints, float]] = field(default_factory=list)
    uses: dict[int, list[tuple[int, Ints]]] = field(default_factory=dict)

    def operation(
        self, inputs: list[int], strategies: Sequence[tuple[int, ...]], work: float, size: float, saved: float
    ) -> int:
        """Adds a group whose one-axis strategies are (input placements..., output placement); returns its
        output tensor."""
        product = list(itertools.product(strategies, repeat=self.axes))
        columns = np.array([[self.index([s[n] for s in k]) for k in product] for n in range(len(inputs) + 1)])
        shards = np.array([np.prod([1.0 if set(s) <= {0} else 1 / 4 for s in k]) for k in product])
        out = np.array([np.prod([1 / 4 if s[-1] in (1, 2, 3) else 1.0 for s in k]) for k in product])
        noise = 1 + 0.1 * self.random.random(len(product))
        group = Group(f"op{len(self.groups)}", work * shards * noise, saved * out, 0.3 * size * out, np.zeros(len(out)))
        self.groups.append(group)
        for tensor, column in zip(inputs, columns, strict=False):
            self.uses.setdefault(tensor, []).append((len(self.groups) - 1, column))
        self.tensors.append((len(self.groups) - 1, columns[-1], size))
        return len(self.tensors) - 1

    def index(self, placements: list[int]) -> int:
        return int(np.ravel_multi_index(placements, (5,) * self.axes))

    def problem(self, limit: float) -> Problem:
        transfers = []
        for tensor, uses in self.uses.items():
            producer, source, size = self.tensors[tensor]
            consumers, targets = zip(*uses, strict=True)
            transfers.append(Transfer(f"t{tensor}", producer, source, consumers, targets, self.metric * size))
        return Problem(tuple(self.groups), tuple(transfers), limit)


# Inputs..., output; 0 R, 1 S(0), 2 S(1), 3 S(2), 4 P.
POINTWISE = [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]
ADD = [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4)]
NORM = [(0, 0), (1, 1), (2, 2)]
MATMUL = [(0, 0, 0), (1, 0, 1), (2, 0, 2), (0, 2, 3), (3, 1, 4)]
ATTENTION = [(0, 0, 0, 0), (1, 1, 1, 1), (3, 3, 3, 3)]
WEIGHT = [(0,), (1,), (2,)]
WEIGHT_GRADIENT = [(0, 0, 0), (1, 1, 4), (2, 2, 4), (3, 0, 1), (0, 3, 2)]
MATMUL_BACK = [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 2, 4), (0, 1, 3)]


def transformer(axes: int, layers: int, seed: int = 0, limit: float = float("inf")) -> Problem:
    """A joint forward and backward graph of ``layers`` transformer layers."""
    random = np.random.default_rng(seed)
    b = Builder(axes, random, reshard_cost(axes, np.array([4.0, 1.0, 0.5])[:axes]))
    x = b.operation([], [(0,), (1,), (2,)], 0.1, 1.0, 1.0)
    tape: list[tuple[str, tuple[int, ...]]] = []

    def linear(value: int, width: float) -> int:
        weight = b.operation([], WEIGHT, 0.0, width, 4 * width)
        out = b.operation([value, weight], MATMUL, 8 * width, width, 0.0)
        tape.append(("linear", (value, weight)))
        return out

    def pointwise(value: int, count: int = 2) -> int:
        for _ in range(count):
            tape.append(("pointwise", (value,)))
            value = b.operation([value], POINTWISE[:4], 0.1, 1.0, 0.5)
        return value

    for _ in range(layers):
        normed = pointwise(b.operation([x], NORM, 0.2, 1.0, 1.0), 1)
        q, k, v = (pointwise(linear(normed, 1.0), 1) for _ in range(3))
        mixed = b.operation([q, k, v], ATTENTION, 4.0, 1.0, 1.0)
        tape.append(("attention", (q, k, v)))
        x = b.operation([x, linear(mixed, 1.0)], ADD, 0.1, 1.0, 1.0)
        normed = b.operation([x], NORM, 0.2, 1.0, 1.0)
        hidden = b.operation([pointwise(linear(normed, 3.0)), linear(normed, 3.0)], ADD[:4], 0.1, 3.0, 3.0)
        x = b.operation([x, linear(hidden, 1.0)], ADD, 0.1, 1.0, 1.0)
    _backward(b, x, tape)
    return b.problem(limit)


def _backward(b: Builder, gradient: int, tape: list[tuple[str, tuple[int, ...]]]) -> None:
    for kind, inputs in reversed(tape):
        if kind == "linear":
            value, weight = inputs
            dw = b.operation([value, gradient], WEIGHT_GRADIENT, 8.0, 1.0, 1.0)
            b.operation([dw, weight], ADD[:3], 0.05, 1.0, 8.0)
            gradient = b.operation([gradient, weight], MATMUL_BACK, 8.0, 1.0, 0.0)
        elif kind == "attention":
            gradient = b.operation([*inputs[:2], gradient], ATTENTION, 8.0, 1.0, 0.0)
        else:
            gradient = b.operation([*inputs, gradient], ADD, 0.1, 1.0, 0.0)


def measure(axes: int, layers: int, tight: float | None, seed: int, limit: float, gap: float) -> dict[str, object]:
    """Solves one instance; ``tight`` places the memory limit between the least (0) and what the free optimum
    needs (1)."""
    problem = transformer(axes, layers, seed)
    if tight is not None:
        free = memory_of(problem, solve(problem, time_limit=limit, gap=gap).choices)
        least = smallest_memory(problem)
        problem = transformer(axes, layers, seed, least + tight * (free - least))
    start = time.process_time()
    reduced, _ = reduce(problem)
    reducing = time.process_time() - start
    start = time.process_time()
    solution = solve(problem, time_limit=limit, gap=gap)
    return {
        "axes": axes,
        "layers": layers,
        "tight": tight,
        "seed": seed,
        "size": size_of(problem),
        "reduced": size_of(reduced),
        "reduce_seconds": round(reducing, 2),
        "cpu_seconds": round(time.process_time() - start, 2),
        "status": solution.status,
        "gap": solution.gap,
        "objective": solution.objective,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axes", type=int, default=2)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tight", type=float, nargs="*", default=[0.5])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--gap", type=float, default=0.005)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for layers, tight, seed in itertools.product(options.layers, [None, *options.tight], range(options.seeds)):
        result = measure(options.axes, layers, tight, seed, options.limit, options.gap)
        print(
            json.dumps(result) if options.json else "  ".join(f"{k} {v}" for k, v in result.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
