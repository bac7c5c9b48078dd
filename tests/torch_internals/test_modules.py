"""Walks over modules against torch's own."""

from __future__ import annotations

import torch
from torch import nn

from autopar.torch_internals.modules import modules_in, named_buffers


def _shared() -> nn.Module:
    """A module that is there twice, a tied weight, a buffer with two names, an empty place."""
    inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = nn.Sequential(inner, nn.ReLU(), nn.Sequential(inner, nn.Linear(3, 3)), nn.BatchNorm1d(3))
    model[2][1].weight = inner[0].weight  # type: ignore[index, union-attr]
    model[3].running_mean = inner[1].running_mean  # type: ignore[union-attr]
    model.register_buffer("own", torch.zeros(2), persistent=False)
    model.register_buffer("missing", None)
    model.register_module("nothing", None)
    return model


def test_modules_are_those_of_torch_in_its_order() -> None:
    model = _shared()
    assert list(map(id, modules_in(model))) == list(map(id, model.modules()))


def test_buffers_have_all_their_names() -> None:
    model = _shared()
    wanted = dict(model.named_buffers(remove_duplicate=False))
    found = named_buffers(model)
    assert list(found) == list(wanted)
    assert all(found[name] is buffer for name, buffer in wanted.items())
