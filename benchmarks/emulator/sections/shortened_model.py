"""Traces three of each run of identical layers, and records which others each represents.

A model of a hundred equal layers costs as much as a model of three, plus ninety-seven times the third layer. Layers are
the elements of a ``ModuleList``, ``ModuleDict`` or ``Sequential``. Two are equal if they have the same types,
parameters, buffers and plain attributes all the way down, except for their own number. The first three of each kind
are traced: the first may differ because of what comes before it, the second lies between equal layers, the third
represents the rest. Modules that compute nothing (:mod:`.stand_in`) replace the rest in the model, so that it still has
as many layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from autopar.errors import TraceError
from autopar.ir.graph import Graph
from autopar.torch_internals.modules import buffers_of, children_of, parameters_of, set_children

from .stand_in import Represented, UnlikeError

_PLAIN = (bool, int, float, str, type(None))
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
Traced = TypeVar("Traced")
# The path of a part of a layer, its type, and the name of an attribute of it.
_Attribute = tuple[str, type, str]


@dataclass(frozen=True)
class Depth:
    """Which layers represent which. ``kinds[path]``: for the list of layers at ``path``, the name of the layer that
    each is priced as: itself, or an earlier one. ``called``: paths of layers in the order in which forward calls them,
    which may alternate between lists or go backwards; layers that it does not contain follow the one before them in
    their list."""

    kinds: dict[str, dict[str, str]]
    called: tuple[str, ...] = ()

    @property
    def paths(self) -> list[str]:
        """Paths of the traced layers."""
        return [inside(path, name) for path, kinds in self.kinds.items() for name in dict.fromkeys(kinds.values())]

    @property
    def priced_as(self) -> tuple[int, ...]:
        """For each layer of the whole model, in the order in which they run, the position in :attr:`paths` of the layer
        that it is priced as."""
        position = {path: i for i, path in enumerate(self.paths)}
        turns, positions = {path: turn for turn, path in enumerate(self.called)}, list[tuple[int, int]]()
        for path, kinds in self.kinds.items():
            turn = -1
            for name, kind in kinds.items():
                turn = turns.get(inside(path, name), turn)
                positions.append((turn, position[inside(path, kind)]))
        return tuple(at for _, at in sorted(positions, key=lambda pair: pair[0]))

    @property
    def is_whole(self) -> bool:
        """Whether no layer represents another."""
        return all(name == kind for kinds in self.kinds.values() for name, kind in kinds.items())


def inside(path: str, name: str) -> str:
    """The path of an element of the module at ``path``, which is empty for the model."""
    return f"{path}.{name}" if path else name


def _signature(module: nn.Module, numbers: frozenset[_Attribute], path: str = "") -> Hashable:
    own = tuple(
        (name, _hashable(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and _is_plain(value) and (path, type(module), name) not in numbers
    )
    state = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items())
        if tensor is not None
    )
    children = tuple(
        (name, _signature(child, numbers, f"{path}.{name}"))
        for name, child in children_of(module).items()
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
    """Attributes that number the layers, from any first number, and that all parts of one type at one path have."""
    offsets: dict[_Attribute, list[int]] = {}
    parts: Counter[tuple[str, type]] = Counter()
    for number, layer in enumerate(layers):
        for path, module in layer.named_modules():
            part = f".{path}" if path else "", type(module)
            parts[part] += 1
            for name, value in vars(module).items():
                if type(value) is int:
                    offsets.setdefault((*part, name), []).append(value - number)
    return frozenset(
        attribute
        for attribute, differences in offsets.items()
        if len(set(differences)) == 1 and len(differences) == parts[attribute[:2]]
    )


def _kinds(layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """For every layer the name of the layer that it is priced as."""
    numbers = _numbers(list(layers.values()))
    kinds: dict[Hashable, list[str]] = {}
    for name, layer in layers.items():
        kinds.setdefault(_signature(layer, numbers), []).append(name)
    priced_as = {name: names[2] for names in kinds.values() for name in names[3:]}
    return {name: priced_as.get(name, name) for name in layers}


def _is_list_of_layers(module: nn.Module, layers: Mapping[str, nn.Module]) -> bool:
    """Whether a container holds layers. A ``Sequential`` of different modules does not; a ``ModuleList`` always does; a
    ``ModuleDict`` does if all are of one class. A container that repeats one module does not."""
    if len(layers) < 2 or len({id(layer) for layer in layers.values()}) < len(layers):
        return False
    if isinstance(module, nn.ModuleDict):
        return len({type(layer) for layer in layers.values()}) == 1
    return isinstance(module, nn.ModuleList) or len(set(_kinds(layers).values())) < len(layers)


@contextmanager
def shortened(model: nn.Module, whole: frozenset[str] = frozenset()) -> Iterator[Depth]:
    """Replaces all but three of each kind of layer in the lists of ``model`` while the context is open, and restores it
    afterwards. Yields which layers the traced ones represent. Lists within layers are left alone, and every layer of
    the lists at the paths ``whole`` is traced."""
    kinds: dict[str, dict[str, str]] = {}
    with ExitStack() as stack:
        for path, module in list(model.named_modules()):
            is_part = any(path.startswith(inside(outer, "")) for outer in kinds)
            layers = {name: child for name, child in children_of(module).items() if child is not None}
            if is_part or not isinstance(module, _LISTS) or not _is_list_of_layers(module, layers):
                continue
            kinds[path] = {name: name for name in layers} if path in whole else _kinds(layers)
            represented = Represented(path)
            stack.callback(represented.close)
            stack.callback(set_children, module, dict(children_of(module)))
            shown = {
                name: layers[name] if name == kind else represented.stand_in(layers[name], layers[kind])
                for name, kind in kinds[path].items()
            }
            set_children(module, shown)
        yield Depth(kinds)


@contextmanager
def _call_order(model: nn.Module, depth: Depth) -> Iterator[Mapping[str, None]]:
    """The paths of layers in the order in which they, or parts of them, are first called while the context is open."""
    places: dict[int, str] = {}
    for path, kinds in depth.kinds.items():
        for name in kinds:
            for part in model.get_submodule(inside(path, name)).modules():
                places.setdefault(id(part), inside(path, name))
    called: dict[str, None] = {}

    def note(module: nn.Module, _: object) -> None:
        if id(module) in places:
            called.setdefault(places[id(module)])

    hook = register_module_forward_pre_hook(note)
    try:
        yield called
    finally:
        hook.remove()


def order_in(graph: Graph, depth: Depth) -> tuple[str, ...]:
    """The paths of layers in the order in which forward first runs an operation of each. ``graph``: as it was traced,
    of all layers."""
    layers = {inside(path, name) for path, kinds in depth.kinds.items() for name in kinds}
    called: dict[str, None] = {}
    running = (node for node in graph.nodes if node.phase == "forward" and not node.is_placeholder)
    for module in dict.fromkeys(node.module for node in running):
        around = accumulate(module.split("."), inside)
        called.update((path, None) for path in around if path in layers)
    return tuple(called)


def traced_short(
    model: nn.Module,
    trace: Callable[[nn.Module], Traced],
    needed: Callable[[Traced, Depth], Iterable[str]],
    convert: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> tuple[Traced, Depth]:
    """Calls ``trace`` with what ``convert`` makes of ``model``, shortened. Returns its result, and which layers
    represent which.

    All layers of a list are traced if they turn out to be unlike, or if ``needed`` says so of what was traced. All
    layers of all lists are traced if the shortened model cannot be traced. Raises :class:`TraceError` if the whole
    model cannot be traced either."""
    whole = frozenset[str]()
    while True:
        with ExitStack() as stack:
            depth = stack.enter_context(shortened(model, whole))
            converted = convert(model)
            called = stack.enter_context(_call_order(converted, depth))
            try:
                traced = trace(converted)
                needed_whole = frozenset(needed(traced, depth))
                if not needed_whole:
                    return traced, replace(depth, called=tuple(called))
                whole |= needed_whole
            except TraceError as error:
                if depth.is_whole:
                    raise
                cause = error.__cause__
                whole |= {cause.path} if isinstance(cause, UnlikeError) else set(depth.kinds)
