"""Calls of operations that torch's test data does not make, or not with what matters: ``(operation, arguments)``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

aten: Any = torch.ops.aten
Call = tuple[Any, tuple[Any, ...]]


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _margins() -> Iterator[Call]:
    """Labels end at the first -1, wherever it is; what is behind it counts for nothing."""
    op = aten.multilabel_margin_loss_forward.default
    for target in ([[3, 0, -1, 1, 1], [0, 1, 2, -1, -1], [1, -1, 1, 1, 1], [2, 3, 4, 1, 0]], [[-1] * 5] * 4):
        yield from ((op, (_x(4, 5), torch.tensor(target), reduction)) for reduction in range(3))
        yield from ((op, (_x(5), torch.tensor(target[0]), reduction)) for reduction in range(3))


def _resamplings() -> Iterator[Call]:
    shapes = {"1d": (2, 3, 5), "2d": (2, 3, 5, 4), "3d": (2, 3, 5, 4, 3)}
    for name in ("upsample_nearest", "_upsample_nearest_exact"):
        for dims, shape in shapes.items():
            yield getattr(aten, name + dims).vec, (_x(*shape), None, [1.7] * (len(shape) - 2))
            yield getattr(aten, name + dims).vec, (_x(*shape), [7] * (len(shape) - 2), None)
    linear = {"upsample_linear1d": "1d", "upsample_bilinear2d": "2d", "upsample_trilinear3d": "3d"}
    smooth = {**linear, "upsample_bicubic2d": "2d", "_upsample_bilinear2d_aa": "2d", "_upsample_bicubic2d_aa": "2d"}
    if hasattr(aten, "_upsample_lanczos2d_aa"):  # Not in torch 2.11.
        smooth["_upsample_lanczos2d_aa"] = "2d"
    for name, dims in smooth.items():
        shape = shapes[dims]
        for corners in (False, True):
            yield getattr(aten, name).vec, (_x(*shape), None, corners, [1.7] * (len(shape) - 2))
            yield getattr(aten, name).vec, (_x(*shape), [7] * (len(shape) - 2), corners, None)


def _recurrent() -> Iterator[Call]:
    gates = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
    for name, count in gates.items():
        for both in (False, True):
            ways = 2 if both else 1
            weights = [[_x(count * 3, 4), _x(count * 3, 3), _x(count * 3), _x(count * 3)] for _ in range(ways)]
            state = [_x(ways, 2, 3), _x(ways, 2, 3)] if name == "lstm" else _x(ways, 2, 3)
            flat = [w for way in weights for w in way]
            options = (flat, True, 1, 0.0, True, both)
            yield getattr(aten, name).input, (_x(5, 2, 4), state, *options, False)
            yield getattr(aten, name).input, (_x(2, 5, 4), state, *options, True)
            yield getattr(aten, name).data, (_x(8, 4), torch.tensor([2, 2, 2, 1, 1]), state, *options)


def _norms() -> Iterator[Call]:
    x, own, running = _x(4, 3, 5), (_x(3), _x(3)), (_x(3), _x(3).exp())
    yield aten._native_batch_norm_legit_functional.default, (x, *own, *running, True, 0.1, 1e-5)
    yield aten._native_batch_norm_legit_no_training.default, (x, *own, *running, 0.1, 1e-5)
    yield aten._batch_norm_no_update.default, (x, *own, *running, 0.1, 1e-5)
    yield aten._batch_norm_with_update_functional.default, (x, *own, *running, 0.1, 1e-5)
    yield aten._fused_rms_norm.default, (_x(4, 5), [5], _x(5), 1e-5)
    yield aten._fused_rms_norm.default, (_x(4, 5), [5], None, None)
    half, weight, bias = _x(4, 6).bfloat16(), _x(6).float(), _x(6).float()
    result = aten.native_layer_norm.default(half, [6], weight, bias, 1e-5)
    yield aten.native_layer_norm.default, (half, [6], weight, bias, 1e-5)
    statistics = [t.float() for t in result[1:]]
    mask = [True, True, True]
    yield aten.native_layer_norm_backward.default, (_x(4, 6).bfloat16(), half, [6], *statistics, weight, bias, mask)
    groups = (4, 6, 1, 3)
    yield aten.native_group_norm.default, (half, weight, bias, *groups, 1e-5)
    mean, rstd = (t.float() for t in aten.native_group_norm.default(half, weight, bias, *groups, 1e-5)[1:])
    yield aten.native_group_norm_backward.default, (_x(4, 6).bfloat16(), half, mean, rstd, weight, *groups, mask)


def _others() -> Iterator[Call]:
    yield aten.dropout.default, (_x(4, 5), 0.5, False)
    yield aten.linear.default, (_x(4, 5), _x(3, 5), _x(3))
    yield aten.linear.default, (_x(5), _x(3, 5))
    yield aten.copy.default, (_x(4, 5), _x(5).float())
    yield aten.zero.default, (_x(4, 5),)
    for x in (_x(4, 5).t(), _x(4, 3, 5).permute(2, 0, 1)):
        yield aten.as_strided.default, (x, [2, 3], [5, 1], 3)
        yield aten.as_strided_scatter.default, (x, _x(2, 3), [2, 3], [5, 1], 3)
    for axes in ([0], [1], [0, 1]):
        yield aten.logsumexp.default, (_x(0, 3), axes)
        yield aten.logsumexp.default, (torch.complex(_x(4, 3), _x(4, 3)), axes)
    yield aten._log_softmax.default, (_x(3, 0), 1, False)


def calls() -> list[Call]:
    """Always the same."""
    torch.manual_seed(0)
    return [*_margins(), *_resamplings(), *_recurrent(), *_norms(), *_others()]
