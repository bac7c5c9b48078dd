"""Walks over modules against torch's own, also after the model has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.torch_internals.module_walk import Walk


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


def _check(walk: Walk, model: nn.Module) -> None:
    assert list(map(id, walk.modules())) == list(map(id, model.modules()))
    assert list(map(id, walk.parameters())) == list(map(id, model.parameters()))
    wanted, found = dict(model.named_buffers(remove_duplicate=False)), walk.named_buffers()
    assert list(found) == list(wanted)
    assert all(found[name] is buffer for name, buffer in wanted.items())


def test_a_walk_finds_what_torch_finds() -> None:
    model = _shared()
    _check(Walk(model), model)


def _move_key(model: Any) -> None:
    """The keys of all buffers, one after the other, stay the same."""
    model[3].register_buffer("next", model[3].num_batches_tracked)
    del model[3].num_batches_tracked
    model[1].register_buffer("next", torch.ones(1))


def _put_new_table(model: Any) -> None:
    model[0].__dict__["_modules"] = {"0": nn.Linear(2, 2)}


def _swap_names(model: Any) -> None:
    inner = model[2]._modules
    names, modules = [*inner], [*inner.values()]
    inner.clear()
    inner.update(zip(names[::-1], modules, strict=True))


def _move_module(model: Any) -> None:
    """The same modules are walked in the same order."""
    first, second = nn.Sequential(nn.BatchNorm1d(3)), nn.Sequential()
    model.extend([first, second])
    list(model.modules())
    second.add_module("0", first._modules.pop("0"))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "module added": lambda model: model.append(nn.BatchNorm1d(3)),
    "module added inside": lambda model: model[2][1].register_module("inner", nn.Linear(2, 2)),
    "module replaced": lambda model: model[0].__setitem__(1, nn.BatchNorm1d(3)),
    "module removed": lambda model: model.__delitem__(0),
    "modules renamed": lambda model: model._modules.update({"late": model._modules.pop("0")}),
    "last module renamed": lambda model: model._modules.update({"late": model._modules.pop([*model._modules][-1])}),
    "names of modules swapped": _swap_names,
    "module moved to the next": _move_module,
    "table replaced": _put_new_table,
    "parameter replaced": lambda model: setattr(model[2][1], "bias", nn.Parameter(torch.ones(3))),
    "parameter removed": lambda model: setattr(model[2][1], "bias", None),
    "parameter tied": lambda model: setattr(model[2][1], "bias", model[3].bias),
    "buffer replaced": lambda model: setattr(model[3], "running_var", torch.ones(3)),
    "buffer added": lambda model: model[1].register_buffer("more", torch.ones(1)),
    "buffer removed": lambda model: delattr(model, "own"),
    "buffer set to None": lambda model: setattr(model, "own", None),
    "buffer renamed": _move_key,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_walk_follows_changes(change: str) -> None:
    model = _shared()
    walk = Walk(model)
    _check(walk, model)
    CHANGES[change](model)
    _check(walk, model)
