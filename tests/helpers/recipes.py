"""Layouts and recipes by their fields."""

from __future__ import annotations

from typing import Any

from autopar.given_fields import own_fields
from autopar.layout import Layout
from benchmarks.recipes import Recipe


def layout_of(**named: Any) -> Layout:
    """A layout, or a recipe if a field or its value is one of recipes alone."""
    of_experts = {"capacity", "dispatch", "gradient_accumulation_fusion"}
    own = {field.name for field in own_fields(Layout)} - of_experts
    is_layout = all(name in own and value in Layout.choices.get(name, (value,)) for name, value in named.items())
    return Layout(**named) if is_layout else Recipe(**named)
