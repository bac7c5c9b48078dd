"""A small model with a tied weight and a buffer, and its program lowered by hand for any (data, tensor) mesh.

``up.weight`` is stored sharded over both axes, worked with whole over data; ``down`` is row-parallel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from autopar.ir.node import Value as V
from autopar.ir.placements import parse_placements
from autopar.ir.program import Instruction, Program, Section, TensorSlot
from autopar.ir.signature import Signature
from autopar.runtime import Compiled, Request

FEATURES, HIDDEN, BATCH = 5, 7, 5

STORED = {"up.weight": "S(1),S(0)", "up.bias": "R,S(0)", "down.weight": "R,S(1)", "down.bias": "R,R"}
SHAPES = {
    "up.weight": (HIDDEN, FEATURES),
    "up.bias": (HIDDEN,),
    "down.weight": (FEATURES, HIDDEN),
    "down.bias": (FEATURES,),
}


class Tiny(nn.Module):
    """``loss`` is the mean square of the output times the tied weight."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, FEATURES)
        self.head = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.head.weight = self.up.weight
        self.register_buffer("steps", torch.zeros(()))
        self.config = {"name": "tiny"}

    def reset_parameters(self) -> None:
        self.steps.zero_()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        out = self.down(self.up(x).relu())
        self.steps.add_(1)
        return {"loss": (self.head(out) ** 2).mean(), "out": out}


@dataclass
class Builder:
    """Collects instructions; a call gives the name of its result."""

    instructions: list[Instruction]

    def __call__(self, name: str, op: str, *args: object, module: str = "") -> V:
        given = tuple(V(a) if isinstance(a, str) and a[:1].islower() and len(a) < 8 and a != "sum" else a for a in args)
        self.instructions.append(Instruction(name, op, given, module=module))
        return V(name)

    def communicate(self, name: str, op: str, *args: object) -> V:
        self(f"{name}_h", f"collective.{op}", *args)
        return self(name, "collective.wait", V(f"{name}_h"))


def forward_instructions(batch: int, gather: bool) -> list[Instruction]:
    do = Builder([])
    do("wut", "aten.t.default", "wu")
    do("a", "aten.addmm.default", "bu", "x", "wut", module="up")
    do("h", "aten.relu.default", "a")
    do("wdt", "aten.t.default", "wd")
    do("yp", "aten.mm.default", "h", "wdt", module="down")
    do.communicate("yr", "all_reduce", "yp", (1,), "sum")
    do("y", "aten.add.Tensor", "yr", "bd")
    do("z", "aten.mm.default", "y", "wut", module="head")
    do("sq", "aten.pow.Tensor_Scalar", "z", 2)
    do("s", "aten.sum.default", "sq")
    do.communicate("total", "all_reduce", "s", (0, 1), "sum")
    do("loss", "aten.div.Tensor", "total", batch * HIDDEN)
    do("count", "aten.add.Tensor", "steps", 1)
    if gather:
        do.communicate("out", "all_gather", "y", (0,), 0, batch, 1)
    return do.instructions


def backward_instructions(batch: int, tangents: tuple[str, ...], wants_input: bool) -> list[Instruction]:
    do = Builder([])
    do("c", "aten.mul.Tensor", "z", 2 / (batch * HIDDEN))
    do("dz", "aten.mul.Tensor", "c", "tl")
    do("dzt", "aten.t.default", "dz")
    do("dwu1", "aten.mm.default", "dzt", "y")
    do("dyp", "aten.mm.default", "dz", "wu")
    do.communicate("dyr", "all_reduce", "dyp", (1,), "sum")
    dy = do("dy", "aten.add.Tensor", "dyr", "to") if "to" in tangents else V("dyr")
    do("dbdp", "aten.sum.dim_IntList", dy, (0,))
    do("dyt", "aten.t.default", dy)
    do("dwdp", "aten.mm.default", "dyt", "h")
    do("dh", "aten.mm.default", dy, "wd")
    do("da", "aten.threshold_backward.default", "dh", "h", 0)
    do("dbup", "aten.sum.dim_IntList", "da", (0,))
    do("bucket", "collective.all_reduce_bucket", (V("dbdp"), V("dwdp"), V("dbup")), (0,), "sum")
    do.instructions.append(Instruction("small", "collective.wait", (V("bucket"),), results=3))
    do("dat", "aten.t.default", "da")
    do("dwu2", "aten.mm.default", "dat", "x")
    do("dwup", "aten.add.Tensor", "dwu1", "dwu2")
    do.communicate("dwu", "reduce_scatter", "dwup", (0,), "sum", 1, 1)
    if wants_input:
        do("dxp", "aten.mm.default", "da", "wu")
        do.communicate("dx", "all_reduce", "dxp", (1,), "sum")
    return do.instructions


def tiny_program(mesh: tuple[int, int], coordinate: tuple[int, ...], request: Request, batch: int) -> Program:
    def slot(name: str, kind: str, target: str, shape: tuple[int, ...], placements: str) -> TensorSlot:
        return TensorSlot(name, kind, target, shape, parse_placements(placements))

    everything = request.outputs != "loss"
    parameters = tuple(
        slot(name, "param", path, SHAPES[path], STORED[path])
        for name, path in zip(("wu", "bu", "wd", "bd"), STORED, strict=True)
    )
    working = (slot("wu", "param", "up.weight", SHAPES["up.weight"], "R,S(0)"), *parameters[1:])
    rest = (slot("x", "input", "x", (batch, FEATURES), "S(0),R"), slot("steps", "buffer", "steps", (), "R,R"))
    results = (
        slot("loss", "output", "0", (), "R,R"),
        *([slot("out", "output", "1", (batch, FEATURES), "R,R")] if everything else []),
        slot("count", "mutation", "steps", (), "R,R"),
    )
    tangents = (slot("tl", "tangent", "0", (), "R,R"),)
    if everything:
        tangents = (*tangents, slot("to", "tangent", "1", (batch, FEATURES), "S(0),R"))
    wants_input = any(
        isinstance(v, torch.Tensor) and v.requires_grad for v in tree_flatten((request.args, request.kwargs))[0]
    )
    gradients = tuple(slot(f"d{s.name}", "gradient", s.target, s.shape, STORED[s.target]) for s in parameters)
    if wants_input:
        gradients = (*gradients, slot("dx", "input_gradient", "x", (batch, FEATURES), "S(0),R"))
    gather = Builder([])
    gather.communicate("whole", "all_gather", "wu", (0,), 1, FEATURES, 1)
    saved = tuple(map(V, ("x", "h", "y", "z", "wu", "wd")))
    names = tuple(t.name for t in tangents)
    outputs = tuple(map(V, ("loss", "out", "count") if everything else ("loss", "count")))
    grads = [V("dwu"), V("small", 2), V("small", 1), V("small", 0), *([V("dx")] if wants_input else [])]
    return Program(
        mesh, coordinate, parameters, (*working, *rest), results, tangents, gradients,
        Section("refresh", ("wu", "bu", "wd", "bd"), tuple(gather.instructions),
                tuple(map(V, ("whole", "bu", "wd", "bd")))),
        Section("forward", ("wu", "bu", "wd", "bd", "x", "steps"),
                tuple(forward_instructions(batch, everything)),
                (*outputs, *(saved if request.grad else ()))),
        Section("backward", (*(v.node for v in saved), *names) if request.grad else (),
                tuple(backward_instructions(batch, names, wants_input)) if request.grad else (),
                tuple(grads) if request.grad else ()),
    )  # fmt: skip


def compile_tiny(mesh: tuple[int, int], coordinate: tuple[int, ...], request: Request) -> Compiled:
    """What a compiler would return for :class:`Tiny`."""
    leaves, spec = tree_flatten((request.args, request.kwargs))
    names = tuple("x" if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
    batch = next(leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor))
    everything = request.outputs != "loss"
    _, output_spec = tree_flatten({"loss": 0, "out": 0})
    signature = Signature(
        spec, names, output_spec, ("0", "1") if everything else ("0", None), "0", ("0", "1"),
        {i: leaf for i, leaf in enumerate(leaves) if names[i] is None}, {},
        {"head.weight": "up.weight"}, request.training,
    )  # fmt: skip
    program = tiny_program(mesh, coordinate, request, batch)
    return Compiled(program, signature, f"plan for batch {batch}", f"tiny {batch}")
