"""The key-value cache of transformers (``StaticCache``) as inputs of a compiled call.

A call of a traced model takes tensors. :class:`CacheInputs` is a cache as a tree of them: the keys and values of each
layer, which stay on the devices (:class:`~autopar.torch_internals.trees.ResidentKey`), and the number of tokens they
hold. In the traced model the tree is a ``StaticCache`` again, whose layers write into these tensors.

Relies on the attributes of ``transformers.cache_utils.StaticLayer`` (5.24): ``keys``, ``values``,
``cumulative_length``, ``is_initialized`` and those that ``lazy_initialization`` sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.torch_internals.trees import MappingKey, ResidentKey, register_pytree_node

# The kinds of layers that hold all tokens, or only those of a window, by the name of their class.
_FULL, _WINDOW = "StaticLayer", "StaticSlidingWindowLayer"


@dataclass(frozen=True)
class CacheShape:
    """The shape of one layer's keys and values: [batch, heads, length, size of a head]."""

    heads: int
    key_size: int
    value_size: int


@dataclass
class CacheInputs:
    """Keys and values of each layer, and the number of tokens they hold (int64, no dims)."""

    tensors: list[torch.Tensor]
    length: torch.Tensor

    @staticmethod
    def of(cache: Any, model: nn.Module, batch: int) -> CacheInputs:
        """The inputs for ``cache``: its tensors, or tensors of their shapes without values if it has none yet. Raises
        :class:`AutoparError` for a cache of another kind."""
        check_cache(cache)
        if cache.is_initialized:
            tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        else:
            tensors = list(_without_values(cache, model, batch))
        return CacheInputs(tensors, cache.layers[0].cumulative_length)

    def flattened(self) -> tuple[list[torch.Tensor], int]:
        """The leaves, and the number of layers."""
        return [self.length, *self.tensors], len(self.tensors) // 2

    def with_keys(self) -> tuple[list[tuple[Any, torch.Tensor]], int]:
        """The leaves with their keys, and the number of layers."""
        leaves, layers = self.flattened()
        names = (f"{index}.{name}" for index in range(layers) for name in ("keys", "values"))
        keys: list[Any] = [MappingKey("length"), *map(ResidentKey, names)]
        return list(zip(keys, leaves, strict=True)), layers


def check_cache(cache: Any) -> None:
    """Raises :class:`AutoparError` for a cache whose layers are not tensors of fixed shapes."""
    kinds = sorted({type(layer).__name__ for layer in cache.layers} - {_FULL})
    if kinds or getattr(cache, "offloading", False):
        what = "a cache in host memory" if not kinds else f"a cache of {', '.join(kinds)}"
        raise AutoparError(
            f"the cache is {what}: an inference module takes a transformers.StaticCache whose layers hold all "
            "tokens. model.generate(...) makes one by itself"
        )


def hold_all_tokens(cache: Any, length: int = 0) -> None:
    """Replaces layers that hold the tokens of a sliding window by ones that hold all, at least ``length``: which tokens
    are attended to is said by the mask. Layers of a window shift their tokens when it is full, so that each step would
    be another program. A cache that has been written to is left alone."""
    if cache.is_initialized or not any(type(layer).__name__ == _WINDOW for layer in cache.layers):
        return
    from transformers.cache_utils import StaticLayer

    longest = max(length, *(layer.max_cache_len for layer in cache.layers))
    for index, layer in enumerate(cache.layers):
        if type(layer).__name__ == _WINDOW:
            cache.layers[index] = StaticLayer(max_cache_len=longest)


def _without_values(cache: Any, model: nn.Module, batch: int) -> Iterator[torch.Tensor]:
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    for layer, shape in zip(cache.layers, cache_shapes(model), strict=True):
        for size in (shape.key_size, shape.value_size):
            yield torch.empty((batch, shape.heads, layer.max_cache_len, size), dtype=dtype, device="meta")


def cache_shapes(model: nn.Module) -> Sequence[CacheShape]:
    """The shape of each layer's cache, by the model's configuration."""
    text = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    return [_shape_of(layer) for layer in text.per_layer_config]


def _shape_of(config: Any) -> CacheShape:
    queries = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // queries
    heads = getattr(config, "num_key_value_heads", None) or queries
    return CacheShape(heads, getattr(config, "qk_head_dim", None) or size, getattr(config, "v_head_dim", None) or size)


def fill_in(cache: Any, tensors: Sequence[torch.Tensor], length: torch.Tensor) -> None:
    """Gives the layers of ``cache`` these tensors, each its own copy of ``length``: every layer counts by itself."""
    for index, layer in enumerate(cache.layers):
        layer.keys, layer.values = tensors[2 * index : 2 * index + 2]
        layer.cumulative_length = length.clone()
        layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
        layer.batch_size, layer.num_heads = layer.keys.shape[:2]
        layer.k_head_dim, layer.v_head_dim = layer.keys.shape[-1], layer.values.shape[-1]
        layer.is_initialized = True


def _rebuilt(leaves: Any, layers: int) -> Any:
    """A ``StaticCache`` of ``layers`` layers that writes into ``leaves``."""
    from transformers.cache_utils import Cache, StaticCache, StaticLayer

    length, *tensors = leaves
    cache = StaticCache.__new__(StaticCache)
    Cache.__init__(cache, layers=[StaticLayer(max_cache_len=1) for _ in range(layers)])
    if isinstance(length, torch.Tensor):  # Else positions of leaves are asked for, not a call.
        for index, layer in enumerate(cache.layers):
            layer.max_cache_len = tensors[2 * index].shape[2]
        fill_in(cache, tensors, length)
        return cache
    return CacheInputs(tensors, length)


register_pytree_node(
    CacheInputs,
    CacheInputs.flattened,
    _rebuilt,
    serialized_type_name="autopar.CacheInputs",
    flatten_with_keys_fn=CacheInputs.with_keys,
)
