"""Deep models made short: of equal layers only three are kept, and it is remembered which others they stand for.

A model of a hundred equal layers costs what a model of three does, and the third layer ninety-seven times more. Layers
are the elements of a ``ModuleList``, ``ModuleDict`` or ``Sequential``; two are equal if they have the same types,
parameters, buffers and plain attributes all the way down, their own number aside. The first three of each kind stay:
the first may differ by what comes before it, the second lies between equal ones, the third stands for the rest. These
keep their places in the model, where others stand in for them that do nothing (:mod:`.stand_in`), so that a model finds
as many layers as it had.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from .errors import TraceError
from .stand_in import Represented, UnlikeError

_PLAIN = (bool, int, float, str, type(None))
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
Traced = TypeVar("Traced")
# The path of a part of a layer, and the name of an attribute of it.
_Attribute = tuple[str, str]


@dataclass(frozen=True)
class Depth:
    """Which layers stand for which: ``kinds[path]`` lists, for the list of layers at ``path``, the name of the layer
    that each is priced as: itself, or one before it."""

    kinds: dict[str, tuple[str, ...]]

    @property
    def paths(self) -> list[str]:
        """Paths of the kept layers."""
        return [f"{path}.{name}" for path, kinds in self.kinds.items() for name in dict.fromkeys(kinds)]

    @property
    def standing(self) -> tuple[int, ...]:
        """For each layer of the whole model, the position in :attr:`paths` of the one it is priced as."""
        position = {path: i for i, path in enumerate(self.paths)}
        return tuple(position[f"{path}.{name}"] for path, kinds in self.kinds.items() for name in kinds)

    @property
    def is_whole(self) -> bool:
        """Whether no layer stands for another."""
        return all(len(set(kinds)) == len(kinds) for kinds in self.kinds.values())


def _signature(module: nn.Module, numbers: frozenset[_Attribute], path: str = "") -> Hashable:
    own = tuple(
        (name, _hashable(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and _is_plain(value) and (path, name) not in numbers
    )
    state = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    )
    children = tuple(
        (name, _signature(child, numbers, f"{path}.{name}"))
        for name, child in module._modules.items()
        if child is not None
    )
    return type(module), own, state, children


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _hashable(value: object) -> Hashable:
    return tuple(map(_hashable, value)) if isinstance(value, (tuple, list)) else value


def _numbers(layers: Sequence[nn.Module]) -> frozenset[_Attribute]:
    """Attributes that number the layers, from whatever first number."""
    offsets: dict[_Attribute, set[int]] = {}
    for number, layer in enumerate(layers):
        for path, module in layer.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    offsets.setdefault((f".{path}" if path else "", name), set()).add(value - number)
    return frozenset(attribute for attribute, found in offsets.items() if len(found) == 1)


def _kinds(layers: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """For every layer the name of the one it is priced as."""
    numbers = _numbers(list(layers.values()))
    kinds: dict[Hashable, list[str]] = {}
    for name, layer in layers.items():
        kinds.setdefault(_signature(layer, numbers), []).append(name)
    priced_as = {name: names[2] for names in kinds.values() for name in names[3:]}
    return tuple(priced_as.get(name, name) for name in layers)


def _is_list_of_layers(module: nn.Module, layers: Mapping[str, nn.Module]) -> bool:
    """A sequence of unlike modules is one thing made of parts, a list of them several; a dict holds layers if all are
    of one class. Layers that are one module several times are computed where that is."""
    if len(layers) < 2 or len({id(layer) for layer in layers.values()}) < len(layers):
        return False
    if isinstance(module, nn.ModuleDict):
        return len({type(layer) for layer in layers.values()}) == 1
    return isinstance(module, nn.ModuleList) or len(set(_kinds(layers))) < len(layers)


@contextlib.contextmanager
def shortened(model: nn.Module, whole: frozenset[str] = frozenset()) -> Iterator[Depth]:
    """``model`` with only three of each kind of layer at work in its lists of layers while the context is open;
    afterwards it is as before. Yields what the kept ones stand for; lists within layers are left alone, and of those at
    the paths ``whole`` every layer is kept."""
    kinds: dict[str, tuple[str, ...]] = {}
    with contextlib.ExitStack() as stack:
        for path, module in list(model.named_modules()):
            inside = any(path.startswith(f"{known}.") for known in kinds)
            layers = {name: child for name, child in module._modules.items() if child is not None}
            if inside or not isinstance(module, _LISTS) or not _is_list_of_layers(module, layers):
                continue
            kinds[path] = tuple(layers) if path in whole else _kinds(layers)
            represented = Represented(path)
            stack.callback(represented.close)
            stack.callback(setattr, module, "_modules", dict(module._modules))
            module._modules = {
                name: layer if name == kind else represented.stand_in(layer, layers[kind])
                for (name, layer), kind in zip(layers.items(), kinds[path], strict=True)
            }
        yield Depth(kinds)


def traced_short(model: nn.Module, trace: Callable[[], Traced]) -> tuple[Traced, Depth]:
    """What ``trace`` makes of ``model`` made short, and what its layers stand for. Layers that turn out to be unlike
    are all kept, and those of every list where a model that is made short cannot be traced. Raises
    :class:`TraceError` if it cannot be traced as it is."""
    whole = frozenset[str]()
    while True:
        with shortened(model, whole) as depth:
            try:
                return trace(), depth
            except TraceError as error:
                if depth.is_whole:
                    raise
                cause = error.__cause__
                whole |= {cause.path} if isinstance(cause, UnlikeError) else set(depth.kinds)
