"""Resolves parameter groups of an optimizer to parameters of a parallel model.

Users may pass a parameter itself, its name, a pair of both, or the plain parameter that the model had before
``parallelize`` replaced it by a DTensor. Groups are resolved to pairs of the model's name and the DTensor, since the
plan says by name where the state of a parameter is stored.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import AutoparError

_REPLACEMENT = "_autopar_replacement"
Named = tuple[str, nn.Parameter]
_watching: list[object] = []


def mark_replaced(plain: nn.Parameter, replacement: nn.Parameter) -> None:
    """Records that ``replacement`` replaces ``plain``. An optimizer that still has ``plain`` raises an error when it
    steps, since it would change nothing."""
    plain.__dict__[_REPLACEMENT] = replacement
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_refuse_replaced))


def _refuse_replaced(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if getattr(parameter, _REPLACEMENT, None) is not None:
                cls = type(optimizer).__name__
                raise AutoparError(
                    f"this {cls} was made before autopar.parallelize, which has replaced the parameters since (the "
                    f"first: parameter {position} of group {index}, {list(parameter.shape)}): its step would change "
                    f"nothing. Make it afterwards: model.optimizer({cls}, lr=...), with params=groups for groups"
                )


class ParamGroups:
    """Resolves groups of parameters of ``module``."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def resolve(self, params: Any = None) -> list[dict[str, Any]]:
        """The groups that torch would create from ``params`` (None: one of all parameters), each with pairs of name and
        parameter. Raises :class:`AutoparError` for a name or tensor that is not a parameter of the model, or is in two
        groups."""
        named, by_id = self._parameters()
        if params is None:
            params = [{"params": list(by_id.values())}]
        groups = []
        for group in _groups(params):
            members = (_find(entry, named, by_id) for entry in _entries(group["params"]))
            pairs = list({id(pair[1]): pair for pair in members}.values())
            # torch has groups of pairs only beside other such groups, and sees no pair in an empty one.
            groups.append({**group, "params": pairs} if pairs else {**group, "params": [], "param_names": []})
        _check_disjoint(groups)
        return groups

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on ``add_param_group`` of ``optimizer`` accepts parameters in all forms of :meth:`resolve`."""
        add = optimizer.add_param_group

        def add_param_group(param_group: dict[str, Any]) -> None:
            for group in self.resolve(param_group):
                add(group)

        optimizer.add_param_group = add_param_group  # type: ignore[method-assign]

    def _parameters(self) -> tuple[dict[str, nn.Parameter], dict[int, Named]]:
        """Parameters by all of their names, and the pair of each with its first name."""
        named = dict(self._module.named_parameters(remove_duplicate=False))
        by_id: dict[int, Named] = {}
        for name, parameter in named.items():
            by_id.setdefault(id(parameter), (name, parameter))
        return named, by_id


def _groups(params: Any) -> list[Mapping[str, Any]]:
    if isinstance(params, Mapping):
        params = [params]
    entries = _entries(params)
    if not any(isinstance(entry, Mapping) for entry in entries):
        return [{"params": entries}]
    for entry in entries:
        if not isinstance(entry, Mapping) or "params" not in entry:
            raise AutoparError(
                f"params has {_described(entry)} among groups: a group is a dict with 'params', such as "
                "{'params': [...], 'weight_decay': 0.0}"
            )
    return entries


def _entries(params: Any) -> list[Any]:
    """A single parameter, name or pair counts as a list of it."""
    if isinstance(params, (str, torch.Tensor)) or _is_pair(params):
        return [params]
    if isinstance(params, (set, frozenset)) or not isinstance(params, Iterable):
        raise AutoparError(f"params is {_described(params)}: give parameters or names in a list, whose order stays")
    return list(params)


def _is_pair(entry: Any) -> bool:
    return (
        isinstance(entry, tuple)
        and len(entry) == 2
        and isinstance(entry[0], str)
        and isinstance(entry[1], torch.Tensor)
    )


def _find(entry: Any, named: Mapping[str, nn.Parameter], by_id: Mapping[int, Named]) -> Named:
    parameter = entry[1] if _is_pair(entry) else entry
    if isinstance(parameter, str):
        if parameter not in named:
            close = difflib.get_close_matches(parameter, named, n=3)
            hint = f"; did you mean {', '.join(close)}?" if close else "; see model.named_parameters()"
            raise AutoparError(f"the model has no parameter called {parameter!r}{hint}")
        parameter = named[parameter]
    parameter = getattr(parameter, _REPLACEMENT, parameter)
    if id(parameter) not in by_id:
        label = f"{entry[0]!r}, " if _is_pair(entry) else ""
        raise AutoparError(
            f"{label}{_described(parameter)}, is not a parameter of this model: take them from "
            "model.named_parameters(), or give their names"
        )
    return by_id[id(parameter)]


def _check_disjoint(groups: list[dict[str, Any]]) -> None:
    first: dict[str, int] = {}
    for index, group in enumerate(groups):
        for name, _ in group["params"]:
            if name in first:
                raise AutoparError(f"the parameter {name} is in the groups {first[name]} and {index}: leave one out")
            first[name] = index


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"
