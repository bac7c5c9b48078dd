"""Chooses, operation by operation, how each value is divided among microbatches, and writes their graph.

The walk is greedy. Of the strategies of an operation it takes one that needs its operands as they are, or as they can
cheaply become without any exchange:

* a replicated value is computed again in pieces by the operations that produced it (constants, expansions);
* a replicated value becomes a part of a sum through division by the number of microbatches;
* a value that depends on data alone comes from the prelude, whole or in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from torch.distributed.tensor import Shard

from autopar.ir.graph import Graph
from autopar.ir.node import Arg, Node, Output, Phase, TensorType, Value, fresh_name, map_arg
from autopar.ir.placements import (
    PARTIAL_SUM,
    REPLICATE,
    AxisStrategy,
    Placement,
    StridedShard,
    is_shard,
    local_shape,
    shard_dim,
)
from autopar.ir.program import is_random
from autopar.ops.random import DRAWS
from autopar.passes.annotate.annotate import axis_strategies
from autopar.passes.rule_language.compose import op_call, replicated
from autopar.passes.rule_language.gradients import linear_in_gradients
from autopar.passes.rule_language.registry import LOCALISERS, LocalCall, LocalContext, OpCall, Operand, local_call
from autopar.passes.rules import RULES
from autopar.passes.rules.random import draw_of_each_piece

from .coupled_samples import split_error
from .data_only import data_only_nodes

IMPOSSIBLE = math.inf
# Ranks, not seconds: making a value again is best, a partial sum next, and a prelude only where nothing else goes.
REMAKE, PART, PRELUDE = 1.0, 2.0, 100.0
Factors = tuple[tuple[int, int], ...]


@dataclass
class Walk:
    """The state of the walk over ``graph`` for ``count`` microbatches.

    ``homes``: the placement in which each value is first computed; ``forms``: its values in the graph of a microbatch,
    by placement; ``from_prelude``: values from the prelude (and the dim they are divided along), by the target of their
    input.
    """

    graph: Graph
    count: int
    inputs: Mapping[str, int | None]
    placeholders: list[Node] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    homes: dict[Value, Placement] = field(default_factory=dict)
    forms: dict[tuple[Value, Placement], Value] = field(default_factory=dict)
    from_prelude: dict[str, tuple[Value, int | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data_only = data_only_nodes(self.graph)
        self.taken = {node.name for node in self.graph}
        self._strategies: dict[tuple[int, Factors], list[AxisStrategy]] = {}
        self._local: dict[tuple[int, int], LocalCall | None] = {}
        self._calls: dict[str, OpCall] = {}
        # Equal calls are one object, and the strategies of each are kept, so that their identities suffice.
        self._distinct: dict[object, OpCall] = {}
        self._remakes: dict[tuple[Value, Placement], tuple[float, AxisStrategy | None]] = {}
        self._offered: dict[tuple[str, Factors], list[AxisStrategy]] = {}
        # By a call and the homes of its operands, which are kept.
        self._free: dict[tuple[int, ...], AxisStrategy | None] = {}
        # The values that there are in another form than that of their home.
        self._several: set[Value] = set()

    def run(self) -> None:
        """Walks forward, then backward, since the placements of tangents depend on the outputs."""
        for node in self.graph:
            if node.is_placeholder and node.op != "tangent":
                dim = self.inputs.get(node.target) if node.op in ("input", "cache") else None
                self._place(node, REPLICATE if dim is None else Shard(dim))
        for phase in ("forward", "backward"):
            if phase == "backward":
                self._place_tangents()
            for node in self.graph:
                if node.phase == phase and not node.is_placeholder:
                    self._choose(node)

    def result(self, output: Output) -> tuple[Value, str]:
        """The value that a microbatch returns for ``output``, and how those of all are combined."""
        value = output.value
        assert value is not None
        node, home = self.graph[value.node], self.homes[value]
        if output.kind == "gradient":
            if self.cost(value, PARTIAL_SUM) == IMPOSSIBLE:
                raise split_error(node, self.count, value)
            return self.take(value, PARTIAL_SUM, node.phase), "sum"
        if home == REPLICATE:
            return self.take(value, home, node.phase), "same"
        if home == PARTIAL_SUM:
            return self.take(value, home, node.phase), "sum"
        if isinstance(home, Shard):
            return self.take(value, home, node.phase), f"concatenate:{home.dim}"
        raise split_error(node, self.count, value)

    def local_type(self, kind: TensorType, place: Placement) -> TensorType:
        """The type of a value in one microbatch."""
        shape = local_shape(tuple(map(int, kind.shape)), (place,), (self.count,), (0,))
        return TensorType(shape, kind.dtype)

    def _place(self, node: Node, place: Placement) -> None:
        value = Value(node.name)
        self.placeholders.append(replace(node, types=(self.local_type(node.type, place),)))
        self.homes[value] = place
        self.forms[value, place] = value

    def _place_tangents(self) -> None:
        """Divides each tangent like its output."""
        values = {output.name: output.value for output in self.graph.outputs if output.kind == "output"}
        for node in self.graph.placeholders("tangent"):
            value = values.get(node.target)
            home = REPLICATE if value is None else self.homes[value]
            self._place(node, home if is_shard(home) else REPLICATE)

    # Choosing strategies

    def _choose(self, node: Node) -> None:
        best = self._free_strategy(node) or self._cheapest(node)
        if best is None:
            self._only_from_prelude(node)
            return
        for index, place in enumerate(best.outputs):
            self.homes[Value(node.name, index)] = place
        emitted = self._emit(node, node.name, best, node.phase)
        for index, place in enumerate(best.outputs):
            self.forms[Value(node.name, index), place] = Value(emitted.name, index)

    def _free_strategy(self, node: Node) -> AxisStrategy | None:
        """The first strategy that takes every operand as it is, if there is one and no operand is there in another
        form, in which another strategy might take it for nothing. Found once for all calls that are alike."""
        if not self._several.isdisjoint(node.operands):
            return None
        homes = [self.homes[value] for value in node.operands]
        key = id(self._call(node)), *map(id, homes)
        if key not in self._free:
            free = (strategy for strategy in self._offers(node) if list(strategy.inputs) == homes)
            self._free[key] = next((each for each in free if self.local_form(node, each) is not None), None)
        return self._free[key]

    def _cheapest(self, node: Node) -> AxisStrategy | None:
        best, price = None, IMPOSSIBLE
        for strategy in self._offers(node):
            cost = self._operands_cost(node, strategy)
            if cost < price and self.local_form(node, strategy) is not None:
                best, price = strategy, cost
            if price == 0:
                break
        return best

    def _only_from_prelude(self, node: Node) -> None:
        """Takes the results of a node that no microbatch can compute from the prelude, if that can compute them."""
        if node.name not in self.data_only:
            raise split_error(node, self.count, self._culprit(node))
        for index, kind in enumerate(node.types):
            value = Value(node.name, index)
            self.homes[value] = REPLICATE
            if kind is not None:
                self._take_from_prelude(value, REPLICATE)

    def _culprit(self, node: Node) -> Value:
        """An operand that is not replicated and cannot be."""
        values = [v for v in node.operands if self.cost(v, REPLICATE) == IMPOSSIBLE]
        values.sort(key=lambda v: is_shard(self.homes[v]))
        return (values or list(node.operands) or [Value(node.name)])[0]

    def _offers(self, node: Node, wanted: Factors = ()) -> list[AxisStrategy]:
        """The strategies of a node, replication first. They include strided shards with the factors of operands, and
        with the ``wanted`` factors (size of a dim, ``before``)."""
        if (node.name, wanted) not in self._offered:
            call = self._call(node)
            factors = {
                *wanted,
                *(
                    (int(kind.shape[place.dim]), place.before)
                    for value, kind in zip(node.operands, call.inputs, strict=True)
                    if isinstance(place := self.homes[value], StridedShard)
                ),
            }
            key = (id(call), tuple(sorted(factors)))
            if key not in self._strategies:
                self._strategies[key] = self._list_strategies(call, factors)
            self._offered[node.name, wanted] = self._strategies[key]
        return self._offered[node.name, wanted]

    def _list_strategies(self, call: OpCall, factors: Collection[tuple[int, int]]) -> list[AxisStrategy]:
        if is_random(call.op) and call.op not in RULES:
            # Microbatches would draw other numbers than the whole batch does.
            return []
        sizes = {size: frozenset(b for s, b in factors if s == size) for size, _ in factors}
        offered = (replicated(call), *axis_strategies(call, sizes), *linear_in_gradients(call))
        return [strategy for strategy in dict.fromkeys(offered) if self._divides(call, strategy)]

    def _divides(self, call: OpCall, strategy: AxisStrategy) -> bool:
        """Whether all pieces are of equal size."""
        places = zip(call.tensors, strategy.places, strict=True)
        dims = ((kind, shard_dim(place)) for kind, place in places)
        return all(k is None or d is None or int(k.shape[d]) % self.count == 0 for k, d in dims)

    def _call(self, node: Node) -> OpCall:
        if node.name not in self._calls:
            key = node.form, tuple(map(self.graph.type_of, node.operands)), node.types
            if key not in self._distinct:
                self._distinct[key] = op_call(self.graph, node, self.count)
            self._calls[node.name] = self._distinct[key]
        return self._calls[node.name]

    def _operands_cost(self, node: Node, strategy: AxisStrategy) -> float:
        return sum(self.cost(v, place) for v, place in zip(node.operands, strategy.inputs, strict=True))

    def cost(self, value: Value, place: Placement) -> float:
        """The cost of ``value`` in ``place``; infinite if that needs other microbatches."""
        home = self.homes[value]
        if home is place or (value, place) in self.forms:
            return 0.0
        if home == REPLICATE and place == PARTIAL_SUM:
            return PART if self.graph.type_of(value).dtype.is_floating_point else IMPOSSIBLE
        return min(self._prelude_cost(value, place), self._remake(value, place)[0])

    def _prelude_cost(self, value: Value, place: Placement) -> float:
        fits = place == REPLICATE or isinstance(place, Shard)
        return PRELUDE if fits and value.node in self.data_only else IMPOSSIBLE

    def _remake(self, value: Value, place: Placement) -> tuple[float, AxisStrategy | None]:
        """The cost of computing the node of ``value``, which is replicated, again in ``place``, and the strategy for
        it."""
        key = value, place
        if key not in self._remakes:
            node = self.graph[value.node]
            self._remakes[key] = (IMPOSSIBLE, None)
            if self.homes[value] == REPLICATE and not node.is_placeholder:
                wanted = self._factors(value, place)
                fitting = [s for s in self._offers(node, wanted) if s.outputs[value.index] == place]
                possible = [s for s in fitting if self.local_form(node, s) is not None]
                costs = [(REMAKE + self._operands_cost(node, s), s) for s in possible]
                best = min(costs, key=lambda pair: pair[0], default=(IMPOSSIBLE, None))
                self._remakes[key] = best if best[0] < IMPOSSIBLE else (IMPOSSIBLE, None)
        return self._remakes[key]

    def _factors(self, value: Value, place: Placement) -> Factors:
        """The factors of strategies that can give ``value`` the placement ``place``."""
        if not isinstance(place, StridedShard):
            return ()
        return ((int(self.graph.type_of(value).shape[place.dim]), place.before),)

    # Writing the graph

    def take(self, value: Value, place: Placement, phase: Phase) -> Value:
        """``value`` in ``place``, computed at its first use; :meth:`cost` must be finite."""
        if (value, place) not in self.forms:
            price, remake = self._remake(value, place)
            if place == PARTIAL_SUM:
                self._take_part(value, phase)
            elif remake is not None and price <= self._prelude_cost(value, place):
                node = self.graph[value.node]
                copy = self._emit(node, fresh_name(f"{node.name}_piece", self.taken), remake, phase)
                self._several.update(Value(node.name, index) for index in range(len(remake.outputs)))
                for index, output_place in enumerate(remake.outputs):
                    self.forms.setdefault((Value(node.name, index), output_place), Value(copy.name, index))
            else:
                self._take_from_prelude(value, place)
        return self.forms[value, place]

    def _take_part(self, value: Value, phase: Phase) -> None:
        """Writes an equal part of a replicated value."""
        node = self.graph[value.node]
        args = (self.forms[value, REPLICATE], 1.0 / self.count)
        name = fresh_name(f"{node.name}_part", self.taken)
        kind = self.graph.type_of(value)
        self.nodes.append(
            Node(
                name=name,
                op="aten.mul.Tensor",
                args=args,
                kwargs=(),
                types=(kind,),
                module=node.module,
                source=node.source,
                phase=phase,
            )
        )
        self.forms[value, PARTIAL_SUM] = Value(name)
        self._several.add(value)

    def _take_from_prelude(self, value: Value, place: Placement) -> None:
        dim = shard_dim(place)
        target = f"prelude.{str(value)[1:]}" + ("" if dim is None else f".pieces{dim}")
        kind = self.local_type(self.graph.type_of(value), place)
        name = fresh_name(f"{value.node}_{'whole' if dim is None else 'pieces'}", self.taken)
        self.placeholders.append(
            Node(name=name, op="input", args=(target,), kwargs=(), types=(kind,), module=self.graph[value.node].module)
        )
        self.from_prelude[target] = (value, dim)
        self.forms[value, place] = Value(name)
        self._several.add(value)

    def _emit(self, node: Node, name: str, strategy: AxisStrategy, phase: Phase) -> Node:
        operands = [self.take(v, p, phase) for v, p in zip(node.operands, strategy.inputs, strict=True)]
        form, call = self.local_form(node, strategy), self._call(node)
        assert form is not None
        op, args, kwargs = form
        is_same = (op, args, kwargs) == (call.op, call.args, call.kwargs) and len(set(operands)) == len(
            set(node.operands)
        )

        def leaf(arg: Arg) -> Arg:
            return operands[arg.index] if isinstance(arg, Operand) else arg

        kwargs = tuple((key, map_arg(arg, leaf)) for key, arg in kwargs)
        places = zip(node.types, strategy.outputs, strict=True)
        types = tuple(kind and self.local_type(kind, place) for kind, place in places)
        emitted = Node(
            name=name,
            op=op,
            args=map_arg(args, leaf),
            kwargs=kwargs,
            types=types,
            module=node.module,
            source=node.source,
            phase=phase,
        )
        self.nodes.append(emitted)
        return emitted.known_from(node, is_same) if is_same else emitted

    def local_form(self, node: Node, strategy: AxisStrategy) -> LocalCall | None:
        """The call that every microbatch runs, or None if it would differ between them. A random draw may differ: its
        state says which microbatch it is."""
        call = self._call(node)
        key = id(call), id(strategy)
        if key not in self._local:
            self._local[key] = self._same_form(call, strategy)
        return self._local[key]

    def _same_form(self, call: OpCall, strategy: AxisStrategy) -> LocalCall | None:
        if not strategy.local and call.op not in LOCALISERS:
            return local_call(self._context(call, strategy, 0))
        first, last = (local_call(self._context(call, strategy, k), strategy.local) for k in (0, self.count - 1))
        if call.op in DRAWS:
            return draw_of_each_piece(first, local_call(self._context(call, strategy, 1)))
        return first if first == last else None

    def _context(self, call: OpCall, strategy: AxisStrategy, index: int) -> LocalContext:
        inputs, outputs = tuple((p,) for p in strategy.inputs), tuple((p,) for p in strategy.outputs)
        return LocalContext(call, inputs, outputs, (self.count,), (index,))
