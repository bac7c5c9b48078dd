"""Folding: nodes that play the same part in equal layers are in one class; text in, text out."""

from __future__ import annotations

from functools import partial

from autopar.passes.annotate.fold import fold_layers
from tests.helpers.pass_text import check

LAYERS = """graph()
%w0: f32[4, 4] = param("layers.0.fc.weight"){w0}
%w1: f32[4, 4] = param("layers.1.fc.weight"){w1}
%w2: f32[4, 8] = param("layers.2.fc.weight"){w2}
%x: f32[2, 4] = input("x"){x}
%a: f32[2, 4] = aten.mm.default(%x, %w0)  @layers.0.fc{a}
%b: f32[2, 4] = aten.mm.default(%a, %w1)  @layers.1.fc{b}
%c: f32[2, 8] = aten.mm.default(%b, %w2)  @layers.2.fc{c}
return output "0" = %c
"""
NAMES = ("w0", "w1", "w2", "x", "a", "b", "c")
PLAIN = LAYERS.format_map(dict.fromkeys(NAMES, ""))


def folded(**classes: str) -> str:
    """The layers, each node in a class of its own but for those in ``classes``."""
    return LAYERS.format_map({name: f"  like %{classes.get(name, name)}" for name in NAMES})


def test_equal_layers_share_a_class_and_a_wider_one_does_not() -> None:
    check(fold_layers, PLAIN, folded(w1="w0", b="a"))


def test_stretches_of_depth_are_apart() -> None:
    check(partial(fold_layers, groups=3), PLAIN, folded())


def test_what_is_pinned_otherwise_is_apart() -> None:
    check(partial(fold_layers, apart={"w1": "S(0)"}), PLAIN, folded(b="a"))


TRAINED = """graph()
%w0: f32[4, 4] = param("layers.0.fc.weight"){w0}
%w1: f32[4, 4] = param("layers.1.fc.weight"){w1}
%w2: f32[4, 4] = param("layers.2.fc.weight"){w2}
%x: f32[2, 4] = input("x"){x}
return gradient "layers.0.fc.weight" = %w0
return gradient "layers.2.fc.weight" = %w2
"""


def test_a_frozen_parameter_is_apart_from_those_that_are_trained() -> None:
    """It has no gradient to reduce, no state and no update."""
    names, tied = ("w0", "w1", "w2", "x"), {"w2": "w0"}
    plain = TRAINED.format_map(dict.fromkeys(names, ""))
    check(fold_layers, plain, TRAINED.format_map({name: f"  like %{tied.get(name, name)}" for name in names}))
