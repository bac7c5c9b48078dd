"""A sample call of torch's test data as a model: an operation, or a module, with parameters that learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True, eq=False)
class OperatorCase:
    """A model and one call of it; ``name`` says which."""

    name: str
    model: nn.Module
    inputs: tuple[torch.Tensor, ...]


class Called(nn.Module):
    """``function`` of the tensors of one call. The first that learns is an input times a parameter of ones, so that
    what is computed depends on the batch too; the others that learn are parameters, the rest are inputs."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        super().__init__()
        self.function = function
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.roles = [""] * len(leaves)
        found = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self.roles[index] = self._role(leaf)
                if self.roles[index] == "scaled":
                    self.register_parameter(f"w{index}", nn.Parameter(torch.ones_like(leaf.detach())))
                if self.roles[index] == "parameter":
                    self.register_parameter(f"w{index}", nn.Parameter(leaf.detach().clone()))
                else:
                    found.append(leaf.detach().clone())
        self.__dict__["given"] = tuple(found)

    def _role(self, leaf: torch.Tensor) -> str:
        if not leaf.requires_grad:
            return "input"
        return "parameter" if "scaled" in self.roles else "scaled"

    def forward(self, *inputs: torch.Tensor) -> Any:
        given = iter(inputs)
        leaves = list(self.leaves)
        for index, role in enumerate(self.roles):
            if role in ("input", "scaled"):
                leaves[index] = next(given)
            if role == "scaled":
                leaves[index] = leaves[index] * getattr(self, f"w{index}")
            if role == "parameter":
                leaves[index] = getattr(self, f"w{index}")
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


def called(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> OperatorCase:
    """The call as a model."""
    model = Called(function, args, kwargs)
    return OperatorCase(name, model, model.__dict__["given"])
