"""Fields of layouts that went to recipes: errors say what each said, and who prices it now."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields

import pytest

from autopar.errors import ArgumentError, OptionsError
from autopar.layout import Layout
from autopar.removed_fields import OLD_NAMES, REMOVED, removed
from benchmarks.recipes import Recipe

# Fields of recipes that layouts never had.
SINCE = {"attention", "activation_gradient", "fp8_head", "expert_groups", "chosen_groups"}
# Those whose values went, not the fields.
VALUES = {name for name in REMOVED if "=" in name}


def test_what_was_removed_is_what_recipes_add() -> None:
    added = {field.name for field in fields(Recipe)} - {field.name for field in fields(Layout)}
    assert added - SINCE == set(REMOVED) - VALUES
    for name, _, value in (text.partition("=") for text in VALUES):
        assert value in Recipe.choices[name] and value not in Layout.choices[name]
    assert set(OLD_NAMES.values()) <= added and added.isdisjoint(OLD_NAMES)


@pytest.mark.parametrize("name", sorted(({*REMOVED} - VALUES) | {*OLD_NAMES}))
def test_errors_teach(name: str) -> None:
    current = OLD_NAMES.get(name, name)
    said = rf"{name}.*: .*said .*; plans do not, .*benchmarks.recipes.Recipe\({current}=\.\.\.\)"
    with pytest.raises(ArgumentError, match=f"Layout has no argument .{said}"):
        Layout(**{name: ()})  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match=said):
        Layout.parse(f"tensor=2 {name}=x")


@pytest.mark.parametrize("text", sorted(VALUES))
def test_values_teach(text: str) -> None:
    name, _, value = text.partition("=")
    with pytest.raises(OptionsError, match=rf"said .*Recipe\({name}=\'{value}\'\)"):
        Layout(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match="said "):
        Layout.parse(text)
    assert str(Recipe.parse(text)).endswith(text)


def test_other_names_are_suggested_as_before() -> None:
    assert not removed("tensors")
    with pytest.raises(ArgumentError, match=r"'tensors': did you mean tensor="):
        Layout(tensors=2)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        _ = Layout().eager  # type: ignore[attr-defined]


def test_layouts_are_copied_and_pickled() -> None:
    for layout in (Layout(tensor=2), Recipe(tensor=2, embedding_as_layers=1)):
        assert pickle.loads(pickle.dumps(layout)) == copy.deepcopy(layout) == layout
