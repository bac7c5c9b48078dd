"""Real calls of layer, root-mean-square and group norm, forward and backward."""

from __future__ import annotations

import torch

from .harness import Sample
from .random_tensors import floats

aten = torch.ops.aten


def _layer_norm(*shape: int, normalized: int) -> list[Sample]:
    x, grad, sizes = floats(*shape), floats(*shape), list(shape[len(shape) - normalized :])
    weight, bias = floats(*sizes), floats(*sizes)
    _, mean, rstd = aten.native_layer_norm.default(x, sizes, weight, bias, 1e-5)
    backward = "aten.native_layer_norm_backward.default"
    return [
        Sample("aten.native_layer_norm.default", (x, sizes, weight, bias, 1e-5)),
        Sample("aten.native_layer_norm.default", (x, sizes, None, None, 1e-5)),
        Sample(backward, (grad, x, sizes, mean, rstd, weight, bias, [True, True, True])),
        Sample(backward, (grad, x, sizes, mean, rstd, weight, None, [True, True, False])),
        Sample(backward, (grad, x, sizes, mean, rstd, None, None, [True, False, False])),
    ]


def _rms_norm(*shape: int) -> list[Sample]:
    x, sizes = floats(*shape), [shape[-1]]
    weight = floats(*sizes)
    return [
        Sample("aten.rms_norm.default", (x, sizes, weight, 1e-5)),
        Sample("aten._fused_rms_norm.default", (x, sizes, weight, 1e-5)),
        Sample("aten._fused_rms_norm.default", (x, sizes, None, None)),
    ]


def _group_norm(n: int, c: int, groups: int, *spatial: int) -> list[Sample]:
    x, grad, weight, bias = floats(n, c, *spatial), floats(n, c, *spatial), floats(c), floats(c)
    sizes = (n, c, x[0, 0].numel(), groups)
    _, mean, rstd = aten.native_group_norm.default(x, weight, bias, *sizes, 1e-5)
    backward = "aten.native_group_norm_backward.default"
    return [
        Sample("aten.native_group_norm.default", (x, weight, bias, *sizes, 1e-5)),
        Sample("aten.native_group_norm.default", (x, None, None, *sizes, 1e-5)),
        Sample(backward, (grad, x, mean, rstd, weight, *sizes, [True, True, True])),
        Sample(backward, (grad, x, mean, rstd, None, *sizes, [True, False, False])),
    ]


def _weight_norm(*shape: int, dim: int) -> list[Sample]:
    v, grad = floats(*shape), floats(*shape)
    g = floats(*(size if d == dim else 1 for d, size in enumerate(shape)))
    _, norms = aten._weight_norm_interface.default(v, g, dim)
    return [
        Sample("aten._weight_norm_interface.default", (v, g, dim)),
        Sample("aten._weight_norm_interface_backward.default", (grad, v, g, norms, dim)),
    ]


SAMPLES = [
    *_weight_norm(12, 6, dim=0),
    *_weight_norm(7, 5, 3, dim=0),
    *_weight_norm(4, 6, 12, dim=2),
    *_layer_norm(12, 6, normalized=1),
    *_layer_norm(7, 5, 6, normalized=1),
    *_layer_norm(5, 12, 3, 4, normalized=2),
    *_rms_norm(12, 6),
    *_rms_norm(5, 7, 6),
    *_group_norm(12, 24, 12, 3, 3),
    *_group_norm(5, 12, 4, 5),
    *_group_norm(4, 7, 7, 2, 2),
]

NEEDS_CUDA = {"aten._fused_rms_norm_backward.default": "has no CPU kernel"}
