"""Deep models made short: of equal layers only two are kept, and it is remembered how many there were.

A model of a hundred equal layers costs what a model of two does, and the second layer ninety-eight times more. Layers
are the elements of a ``ModuleList`` or ``Sequential``; two are equal if they have the same types, parameters, buffers
and plain attributes all the way down, their own number aside. The first two of each kind stay, in order: the first may
differ by what comes before it, the second stands for the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from torch import nn

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Depth:
    """Which layers stand for which: ``kinds[path]`` lists, for the list of layers at ``path``, the kept layer (by its
    number in the shortened list) that each layer of the whole model is priced as."""

    kinds: dict[str, tuple[int, ...]]

    @property
    def paths(self) -> list[str]:
        """Paths of the kept layers in the shortened model."""
        return [f"{path}.{number}" for path, kinds in self.kinds.items() for number in range(max(kinds) + 1)]

    @property
    def standing(self) -> tuple[int, ...]:
        """For each layer of the whole model, the position in :attr:`paths` of the one it is priced as."""
        found: list[int] = []
        first = 0
        for kinds in self.kinds.values():
            found += [first + number for number in kinds]
            first += max(kinds) + 1
        return tuple(found)

    def count(self, path: str, number: int) -> int:
        """How many layers of the whole model the kept layer ``number`` of the list at ``path`` stands for."""
        return self.kinds[path].count(number)


def _signature(module: nn.Module, number: int) -> Hashable:
    own = tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and isinstance(value, _PLAIN) and not _is_number(value, number)
    )
    state = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    )
    children = tuple((name, _signature(child, number)) for name, child in module._modules.items() if child is not None)
    return type(module), own, state, children


def _is_number(value: object, number: int) -> bool:
    return type(value) is int and value == number


def _kept(signatures: list[Hashable]) -> tuple[list[int], tuple[int, ...]]:
    """The numbers of the layers that stay, and for every layer the position among them of the one it is priced as."""
    seen: dict[Hashable, list[int]] = {}
    kept: list[int] = []
    standing: list[int] = []
    for number, signature in enumerate(signatures):
        found = seen.setdefault(signature, [])
        if len(found) < 2:
            found.append(len(kept))
            kept.append(number)
        standing.append(found[-1])
    return kept, tuple(standing)


@contextlib.contextmanager
def shortened(model: nn.Module) -> Iterator[Depth]:
    """``model`` with only two of each kind of layer in its lists of layers while the context is open; afterwards it is
    as before. Yields what the kept ones stand for; lists within layers are left alone."""
    changed: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
    kinds: dict[str, tuple[int, ...]] = {}
    try:
        for path, module in list(model.named_modules()):
            inside = any(path.startswith(f"{known}.") for known in kinds)
            if inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
                continue
            layers = list(module)
            kept, standing = _kept([_signature(layer, number) for number, layer in enumerate(layers)])
            # A sequence of unlike modules is one thing made of parts, a list of them several.
            if len(layers) < 2 or (len(kept) == len(layers) and isinstance(module, nn.Sequential)):
                continue
            changed.append((module, dict(module._modules)))
            module._modules = {str(i): layers[number] for i, number in enumerate(kept)}
            kinds[path] = standing
        yield Depth(kinds)
    finally:
        for module, modules in changed:
            module._modules = modules
