"""Names that fields of layouts had before."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest

import autopar
from autopar.errors import OptionsError
from autopar.layout import Layout
from autopar.renamed_fields import LAYOUT_FIELDS

# Old name -> (its value, the new name, the new value), none of them the default.
RENAMED: Mapping[str, tuple[Any, str, Any]] = {
    "adding": (True, "gradient_accumulation_fusion", False),
    "apart": (("*.query",), "separate_dgrad_reductions", ("*.query",)),
    "balanced": (False, "context_load_balancing", False),
    "graphed": ((), "cuda_graphs", ()),
    "holds": (("loss",), "retained_inputs", ("loss",)),
    "lead": (1, "embedding_as_layers", 1),
    "tail": (2, "head_as_layers", 2),
    "whole": (("*loss*", "head"), "replicated", ("*loss*", "head")),
}
EVERY = pytest.mark.parametrize("old", RENAMED)


def test_every_old_name_is_tried() -> None:
    assert set(RENAMED) == set(LAYOUT_FIELDS)
    assert {new for _, new, _ in RENAMED.values()} <= {field.name for field in fields(Layout)}


@EVERY
def test_old_keywords_make_the_same_layout(old: str) -> None:
    value, new, new_value = RENAMED[old]
    with pytest.warns(DeprecationWarning, match=rf"Layout\.{old} is deprecated; use Layout\.{new}\b"):
        layout = Layout(tensor=2, **{old: value})
    assert layout == Layout(tensor=2, **{new: new_value}) != Layout(tensor=2)


@EVERY
def test_attributes_are_read_by_their_old_names(old: str) -> None:
    value, new, new_value = RENAMED[old]
    layout = Layout(**{new: new_value})
    with pytest.warns(DeprecationWarning, match=rf"use Layout\.{new}\b"):
        assert getattr(layout, old) == value


@EVERY
def test_text_with_old_names_is_read(old: str) -> None:
    value, new, new_value = RENAMED[old]
    text = "+".join(value) if isinstance(value, tuple) else str(value)
    with pytest.warns(DeprecationWarning, match=rf"use Layout\.{new}\b"):
        layout = Layout.parse(f"tensor=2 {old}={text}")
    assert layout == Layout(tensor=2, **{new: new_value})
    assert f"{new}=" in str(layout) and f" {old}=" not in str(layout)
    assert Layout.parse(str(layout)) == layout


@EVERY
def test_layouts_are_replaced_by_old_names(old: str) -> None:
    value, new, new_value = RENAMED[old]
    with pytest.warns(DeprecationWarning, match=rf"use Layout\.{new}\b"):
        assert replace(Layout(data=4), **{old: value}) == Layout(data=4, **{new: new_value})


def test_a_warning_points_to_the_caller() -> None:
    with pytest.warns(DeprecationWarning) as warned:
        _ = Layout(lead=1).lead  # type: ignore[call-arg, attr-defined]
    assert [warning.filename for warning in warned] == [__file__, __file__]


def test_old_names_are_checked_like_new_ones() -> None:
    with pytest.warns(DeprecationWarning), pytest.raises(OptionsError, match="gradient_accumulation_fusion='no'"):
        Layout(adding="no")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="follow"):
        Layout(follow=1)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="'Layout' object has no attribute 'follow'"):
        _ = Layout().follow  # type: ignore[attr-defined]


def test_layouts_are_copied_and_pickled_without_a_warning() -> None:
    layout = Layout(tensor=2, embedding_as_layers=1)
    assert pickle.loads(pickle.dumps(layout)) == copy.deepcopy(layout) == layout


def test_published_results_can_still_be_read() -> None:
    """Files that hold layouts under the old names."""
    text = "tensor=8 pipeline=16 data=128 microbatch=1 interleave=8 sequence_parallel=True zero=2 lead=1 tail=1"
    with pytest.warns(DeprecationWarning):
        layout = Layout.parse(text)
    assert layout == autopar.Layout(
        8, 16, 128, interleave=8, sequence_parallel=True, zero=2, embedding_as_layers=1, head_as_layers=1
    )
