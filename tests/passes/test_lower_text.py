"""The program of a small perceptron under four named strategies, word for word: what lowering writes for a choice of
placements. Rank at the origin; gradients and refreshed weights of one kind travel in one bucket."""

from __future__ import annotations

import pytest

from autopar.cluster.description import Cluster
from autopar.ir.assignment import Assignment, ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.placements import Placements, Strategy, parse_placement
from autopar.passes.annotate.annotate import annotate
from autopar.passes.lower.lower import Lowering, lower
from autopar.passes.recompute.saved_values import save_activations
from autopar.placement.prices import Prices

PERCEPTRON = """graph()
%up: f32[4, 8] = param("up")
%down: f32[8, 4] = param("down")
%x: f32[8, 4] = input("x")
%one: f32[] = tangent("0")
%h: f32[8, 8] = aten.mm.default(%x, %up)
%a: f32[8, 8] = aten.tanh.default(%h)
%y: f32[8, 4] = aten.mm.default(%a, %down)
%loss: f32[] = aten.sum.default(%y)
backward %dy: f32[8, 4] = aten.expand.default(%one, [8, 4])
backward %at: f32[8, 8] = aten.permute.default(%a, [1, 0])
backward %ddown: f32[8, 4] = aten.mm.default(%at, %dy)
backward %downt: f32[4, 8] = aten.permute.default(%down, [1, 0])
backward %da: f32[8, 8] = aten.mm.default(%dy, %downt)
backward %dh: f32[8, 8] = aten.tanh_backward.default(%da, %a)
backward %xt: f32[4, 8] = aten.permute.default(%x, [1, 0])
backward %dup: f32[4, 8] = aten.mm.default(%xt, %dh)
return output "0" = %loss
return gradient "up" = %dup
return gradient "down" = %ddown
"""

# How an axis divides the work: the operands and the result of each operation.
BATCH = {
    "x": "-> S(0)",
    "one": "-> R",
    "h": "S(0) R -> S(0)",
    "a": "S(0) -> S(0)",
    "a_rest": "S(0) -> S(0)",
    "y": "S(0) R -> S(0)",
    "loss": "S(0) -> P(sum)",
    "dy": "R -> S(0)",
    "at": "S(0) -> S(1)",
    "ddown": "S(1) S(0) -> P(sum)",
    "downt": "R -> R",
    "da": "S(0) R -> S(0)",
    "dh": "S(0) S(0) -> S(0)",
    "xt": "S(0) -> S(1)",
    "dup": "S(1) S(0) -> P(sum)",
}
HIDDEN = {
    "x": "-> R",
    "one": "-> R",
    "h": "R S(1) -> S(1)",
    "a": "S(1) -> S(1)",
    "a_rest": "S(1) -> S(1)",
    "y": "S(1) S(0) -> P(sum)",
    "loss": "R -> R",
    "dy": "R -> R",
    "at": "S(1) -> S(0)",
    "ddown": "S(0) R -> S(0)",
    "downt": "S(0) -> S(1)",
    "da": "R S(1) -> S(1)",
    "dh": "S(1) S(1) -> S(1)",
    "xt": "R -> R",
    "dup": "R S(1) -> S(1)",
}
# For an axis the resting places (weight, gradient, optimizer state) of the two matrices.
REPLICATED = {"up": "R R R", "down": "R R R"}
ZERO_1 = {"up": "R R S(0)", "down": "R R S(1)"}
ZERO_3 = {"up": "S(0) S(0) S(0)", "down": "S(0) S(0) S(0)"}
TENSOR = {"up": "S(1) S(1) S(1)", "down": "S(0) S(0) S(0)"}

Axis = tuple[dict[str, str], dict[str, str]]
DATA, SHARDED_STATE, SHARDED, MATRICES = (BATCH, REPLICATED), (BATCH, ZERO_1), (BATCH, ZERO_3), (HIDDEN, TENSOR)


def across(axes: list[str]) -> tuple[Placements, ...]:
    """``["S(0) R", "R R"]``, one text per axis, as the placements of each tensor."""
    return tuple(zip(*([parse_placement(word) for word in text.split()] for text in axes), strict=True))


def program(*axes: Axis) -> str:
    """The text of the program of the first rank, on a mesh with an axis of two devices for each of ``axes``."""
    mesh = (2,) * len(axes)
    graph = annotate(save_activations(Graph.from_text(PERCEPTRON)), mesh)
    strategies = {}
    for node in graph.nodes:
        if node.op != "param":
            taken, made = zip(*(work[node.name].split("->") for work, _ in axes), strict=True)
            wanted = Strategy(across(list(taken)), across(list(made)))
            assert wanted in graph.strategies[node.name], f"{node.name}: {wanted}"
            strategies[node.name] = wanted
    places = {name: ParameterPlacement(*across([rests[name] for _, rests in axes])) for name in ("up", "down")}
    assignment = Assignment(mesh, strategies, places)
    prices = Prices.of(Cluster.get("dgx-a100-80gb"), mesh, graph)
    return str(
        lower(Lowering(graph, assignment, (0,) * len(axes), prices.path, 1 << 20, prices.messages), graph.outputs)
    )


PROGRAMS = [
    pytest.param(
        (DATA,),
        """# rank at (0,) of mesh (2,)
refresh(%up, %down):
  return %up, %down
forward(%up, %down, %x):
  %h = aten.mm.default(%x, %up)
  %a = aten.tanh.default(%h)
  %y = aten.mm.default(%a, %down)
  %loss = aten.sum.default(%y)
  %loss_all_reduce = collective.all_reduce(%loss, axes=[0], op="sum")
  %loss_all_reduce_wait = collective.wait(%loss_all_reduce)
  return %loss_all_reduce_wait, %a, %down, %x
backward(%a_rest, %down, %x, %one):
  %dy = aten.expand.default(%one, [4, 4])
  %at = aten.permute.default(%a_rest, [1, 0])
  %ddown = aten.mm.default(%at, %dy)
  %downt = aten.permute.default(%down, [1, 0])
  %da = aten.mm.default(%dy, %downt)
  %dh = aten.tanh_backward.default(%da, %a_rest)
  %xt = aten.permute.default(%x, [1, 0])
  %dup = aten.mm.default(%xt, %dh)
  %gradients = collective.all_reduce_bucket([%ddown, %dup], axes=[0], op="sum")
  %gradients_wait, %gradients_wait.1 = collective.wait(%gradients)
  return %gradients_wait.1, %gradients_wait""",
        id="data parallel",
    ),
    pytest.param(
        (SHARDED_STATE,),
        """# rank at (0,) of mesh (2,)
refresh(%up, %down):
  %weights = collective.all_gather_bucket([%up, %down], axes=[0], dims=[0, 1], sizes=[4, 4], befores=[1, 1])
  %weights_wait, %weights_wait.1 = collective.wait(%weights)
  return %weights_wait, %weights_wait.1
forward(%up, %down, %x):
  %h = aten.mm.default(%x, %up)
  %a = aten.tanh.default(%h)
  %y = aten.mm.default(%a, %down)
  %loss = aten.sum.default(%y)
  %loss_all_reduce = collective.all_reduce(%loss, axes=[0], op="sum")
  %loss_all_reduce_wait = collective.wait(%loss_all_reduce)
  return %loss_all_reduce_wait, %a, %down, %x
backward(%a_rest, %down, %x, %one):
  %dy = aten.expand.default(%one, [4, 4])
  %at = aten.permute.default(%a_rest, [1, 0])
  %ddown = aten.mm.default(%at, %dy)
  %downt = aten.permute.default(%down, [1, 0])
  %da = aten.mm.default(%dy, %downt)
  %dh = aten.tanh_backward.default(%da, %a_rest)
  %xt = aten.permute.default(%x, [1, 0])
  %dup = aten.mm.default(%xt, %dh)
  %gradients = collective.all_reduce_bucket([%ddown, %dup], axes=[0], op="sum")
  %gradients_wait, %gradients_wait.1 = collective.wait(%gradients)
  %gradients_wait_slice = collective.slice(%gradients_wait, axes=[0], dim=1, before=1)
  %gradients_wait_slice_1 = collective.slice(%gradients_wait.1, axes=[0], dim=0, before=1)
  return %gradients_wait_slice_1, %gradients_wait_slice""",
        id="ZeRO-1",
    ),
    pytest.param(
        (SHARDED,),
        """# rank at (0,) of mesh (2,)
refresh(%up, %down):
  return %up, %down
forward(%up, %down, %x):
  %up_all_gather = collective.all_gather(%up, axes=[0], dim=0, size=4, before=1)
  %up_all_gather_wait = collective.wait(%up_all_gather)
  %h = aten.mm.default(%x, %up_all_gather_wait)
  %a = aten.tanh.default(%h)
  %down_all_gather = collective.all_gather(%down, axes=[0], dim=0, size=8, before=1)
  %down_all_gather_wait = collective.wait(%down_all_gather)
  %y = aten.mm.default(%a, %down_all_gather_wait)
  %loss = aten.sum.default(%y)
  %loss_all_reduce = collective.all_reduce(%loss, axes=[0], op="sum")
  %loss_all_reduce_wait = collective.wait(%loss_all_reduce)
  return %loss_all_reduce_wait, %a, %down, %x
backward(%a_rest, %down, %x, %one):
  %dy = aten.expand.default(%one, [4, 4])
  %at = aten.permute.default(%a_rest, [1, 0])
  %ddown = aten.mm.default(%at, %dy)
  %down_all_gather = collective.all_gather(%down, axes=[0], dim=0, size=8, before=1)
  %down_all_gather_wait = collective.wait(%down_all_gather)
  %downt = aten.permute.default(%down_all_gather_wait, [1, 0])
  %da = aten.mm.default(%dy, %downt)
  %dh = aten.tanh_backward.default(%da, %a_rest)
  %xt = aten.permute.default(%x, [1, 0])
  %dup = aten.mm.default(%xt, %dh)
  %gradients = collective.reduce_scatter_bucket([%ddown, %dup], axes=[0], op="sum", dims=[0, 0], befores=[1, 1])
  %gradients_wait, %gradients_wait.1 = collective.wait(%gradients)
  return %gradients_wait.1, %gradients_wait""",
        id="ZeRO-3",
    ),
    pytest.param(
        (MATRICES,),
        """# rank at (0,) of mesh (2,)
refresh(%up, %down):
  return %up, %down
forward(%up, %down, %x):
  %h = aten.mm.default(%x, %up)
  %a = aten.tanh.default(%h)
  %y = aten.mm.default(%a, %down)
  %y_all_reduce = collective.all_reduce(%y, axes=[0], op="sum")
  %y_all_reduce_wait = collective.wait(%y_all_reduce)
  %loss = aten.sum.default(%y_all_reduce_wait)
  return %loss, %a, %down, %x
backward(%a_rest, %down, %x, %one):
  %dy = aten.expand.default(%one, [8, 4])
  %at = aten.permute.default(%a_rest, [1, 0])
  %ddown = aten.mm.default(%at, %dy)
  %downt = aten.permute.default(%down, [1, 0])
  %da = aten.mm.default(%dy, %downt)
  %dh = aten.tanh_backward.default(%da, %a_rest)
  %xt = aten.permute.default(%x, [1, 0])
  %dup = aten.mm.default(%xt, %dh)
  return %dup, %ddown""",
        id="tensor parallel",
    ),
    pytest.param(
        (DATA, DATA),
        """# rank at (0, 0) of mesh (2, 2)
refresh(%up, %down):
  return %up, %down
forward(%up, %down, %x):
  %h = aten.mm.default(%x, %up)
  %a = aten.tanh.default(%h)
  %y = aten.mm.default(%a, %down)
  %loss = aten.sum.default(%y)
  %loss_all_reduce = collective.all_reduce(%loss, axes=[0, 1], op="sum")
  %loss_all_reduce_wait = collective.wait(%loss_all_reduce)
  return %loss_all_reduce_wait, %a, %down, %x
backward(%a_rest, %down, %x, %one):
  %dy = aten.expand.default(%one, [2, 4])
  %at = aten.permute.default(%a_rest, [1, 0])
  %ddown = aten.mm.default(%at, %dy)
  %downt = aten.permute.default(%down, [1, 0])
  %da = aten.mm.default(%dy, %downt)
  %dh = aten.tanh_backward.default(%da, %a_rest)
  %xt = aten.permute.default(%x, [1, 0])
  %dup = aten.mm.default(%xt, %dh)
  %gradients = collective.all_reduce_bucket([%ddown, %dup], axes=[0, 1], op="sum")
  %gradients_wait, %gradients_wait.1 = collective.wait(%gradients)
  return %gradients_wait.1, %gradients_wait""",
        id="data x data",
    ),
    pytest.param(
        (DATA, MATRICES),
        """# rank at (0, 0) of mesh (2, 2)
refresh(%up, %down):
  return %up, %down
forward(%up, %down, %x):
  %h = aten.mm.default(%x, %up)
  %a = aten.tanh.default(%h)
  %y = aten.mm.default(%a, %down)
  %y_all_reduce = collective.all_reduce(%y, axes=[1], op="sum")
  %y_all_reduce_wait = collective.wait(%y_all_reduce)
  %loss = aten.sum.default(%y_all_reduce_wait)
  %loss_all_reduce = collective.all_reduce(%loss, axes=[0], op="sum")
  %loss_all_reduce_wait = collective.wait(%loss_all_reduce)
  return %loss_all_reduce_wait, %a, %down, %x
backward(%a_rest, %down, %x, %one):
  %dy = aten.expand.default(%one, [4, 4])
  %at = aten.permute.default(%a_rest, [1, 0])
  %ddown = aten.mm.default(%at, %dy)
  %downt = aten.permute.default(%down, [1, 0])
  %da = aten.mm.default(%dy, %downt)
  %dh = aten.tanh_backward.default(%da, %a_rest)
  %xt = aten.permute.default(%x, [1, 0])
  %dup = aten.mm.default(%xt, %dh)
  %gradients = collective.all_reduce_bucket([%ddown, %dup], axes=[0], op="sum")
  %gradients_wait, %gradients_wait.1 = collective.wait(%gradients)
  return %gradients_wait.1, %gradients_wait""",
        id="data x tensor",
    ),
    pytest.param(
        (SHARDED, SHARDED),
        """# rank at (0, 0) of mesh (2, 2)
refresh(%up, %down):
  return %up, %down
forward(%up, %down, %x):
  %up_all_gather = collective.all_gather(%up, axes=[0, 1], dim=0, size=4, before=1)
  %up_all_gather_wait = collective.wait(%up_all_gather)
  %h = aten.mm.default(%x, %up_all_gather_wait)
  %a = aten.tanh.default(%h)
  %down_all_gather = collective.all_gather(%down, axes=[0, 1], dim=0, size=8, before=1)
  %down_all_gather_wait = collective.wait(%down_all_gather)
  %y = aten.mm.default(%a, %down_all_gather_wait)
  %loss = aten.sum.default(%y)
  %loss_all_reduce = collective.all_reduce(%loss, axes=[0, 1], op="sum")
  %loss_all_reduce_wait = collective.wait(%loss_all_reduce)
  return %loss_all_reduce_wait, %a, %down, %x
backward(%a_rest, %down, %x, %one):
  %dy = aten.expand.default(%one, [2, 4])
  %at = aten.permute.default(%a_rest, [1, 0])
  %ddown = aten.mm.default(%at, %dy)
  %down_all_gather = collective.all_gather(%down, axes=[0, 1], dim=0, size=8, before=1)
  %down_all_gather_wait = collective.wait(%down_all_gather)
  %downt = aten.permute.default(%down_all_gather_wait, [1, 0])
  %da = aten.mm.default(%dy, %downt)
  %dh = aten.tanh_backward.default(%da, %a_rest)
  %xt = aten.permute.default(%x, [1, 0])
  %dup = aten.mm.default(%xt, %dh)
  %gradients = collective.reduce_scatter_bucket([%ddown, %dup], axes=[0, 1], op="sum", dims=[0, 0], befores=[1, 1])
  %gradients_wait, %gradients_wait.1 = collective.wait(%gradients)
  return %gradients_wait.1, %gradients_wait""",
        id="ZeRO-3 on both axes",
    ),
    pytest.param(
        (SHARDED_STATE, MATRICES),
        """# rank at (0, 0) of mesh (2, 2)
refresh(%up, %down):
  %weights = collective.all_gather_bucket([%up, %down], axes=[0], dims=[0, 1], sizes=[4, 4], befores=[1, 1])
  %weights_wait, %weights_wait.1 = collective.wait(%weights)
  return %weights_wait, %weights_wait.1
forward(%up, %down, %x):
  %h = aten.mm.default(%x, %up)
  %a = aten.tanh.default(%h)
  %y = aten.mm.default(%a, %down)
  %y_all_reduce = collective.all_reduce(%y, axes=[1], op="sum")
  %y_all_reduce_wait = collective.wait(%y_all_reduce)
  %loss = aten.sum.default(%y_all_reduce_wait)
  %loss_all_reduce = collective.all_reduce(%loss, axes=[0], op="sum")
  %loss_all_reduce_wait = collective.wait(%loss_all_reduce)
  return %loss_all_reduce_wait, %a, %down, %x
backward(%a_rest, %down, %x, %one):
  %dy = aten.expand.default(%one, [4, 4])
  %at = aten.permute.default(%a_rest, [1, 0])
  %ddown = aten.mm.default(%at, %dy)
  %downt = aten.permute.default(%down, [1, 0])
  %da = aten.mm.default(%dy, %downt)
  %dh = aten.tanh_backward.default(%da, %a_rest)
  %xt = aten.permute.default(%x, [1, 0])
  %dup = aten.mm.default(%xt, %dh)
  %gradients = collective.all_reduce_bucket([%ddown, %dup], axes=[0], op="sum")
  %gradients_wait, %gradients_wait.1 = collective.wait(%gradients)
  %gradients_wait_slice = collective.slice(%gradients_wait, axes=[0], dim=1, before=1)
  %gradients_wait_slice_1 = collective.slice(%gradients_wait.1, axes=[0], dim=0, before=1)
  return %gradients_wait_slice_1, %gradients_wait_slice""",
        id="ZeRO-1 x tensor",
    ),
]


@pytest.mark.parametrize(("axes", "expected"), PROGRAMS)
def test_the_program_reads(axes: tuple[Axis, ...], expected: str) -> None:
    assert program(*axes).strip() == expected
