"""What no output needs is removed, with its constants; text in, text out."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.ir.graph import Graph
from autopar.passes.normalise.eliminate_dead import RemoveDead
from tests.helpers.pass_text import check

BEFORE = """graph(b=2)
%x: f32[b] = input("x")
%used: f32[2] = constant("used")
%left: f32[2] = constant("left")
%dead: f32[2] = aten.neg.default(%left)
%y: f32[2] = aten.neg.default(%used)
return output "0" = %y
"""
AFTER = """graph(b=2)
%x: f32[b] = input("x")
%used: f32[2] = constant("used")
%y: f32[2] = aten.neg.default(%used)
return output "0" = %y
"""


def test_what_no_output_needs_is_removed() -> None:
    check(RemoveDead(), BEFORE, AFTER)


def test_constants_are_removed_with_their_nodes() -> None:
    graph = replace(Graph.from_text(BEFORE), constants={"used": torch.ones(2), "left": torch.zeros(2)})
    assert list(RemoveDead()(graph).constants) == ["used"]
