"""Samples of cutting, joining, padding, windows and factories."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .harness import Sample


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _cuts() -> Iterator[Sample]:
    x = _x(7, 36)
    for name in ("split", "unsafe_split", "split_copy"):
        yield Sample(f"aten.{name}.Tensor", (x, 12, 1))
        yield Sample(f"aten.{name}.Tensor", (x, 8, -1))
        yield Sample(f"aten.{name}.Tensor", (x, 36, 1))
        yield Sample(f"aten.{name}.Tensor", (x, 3))
    for name in ("split_with_sizes", "unsafe_split_with_sizes", "split_with_sizes_copy"):
        yield Sample(f"aten.{name}.default", (x, [12, 12, 12], 1))
        yield Sample(f"aten.{name}.default", (x, [24, 6, 6], -1))
        yield Sample(f"aten.{name}.default", (x, [3, 4]))
    for name in ("select", "select_copy"):
        yield Sample(f"aten.{name}.int", (_x(7, 3, 12), 1, 2))
        yield Sample(f"aten.{name}.int", (x, -1, -3))
    for name in ("unbind", "unbind_copy"):
        yield Sample(f"aten.{name}.int", (_x(7, 3, 12), 1))
        yield Sample(f"aten.{name}.int", (_x(2, 12),))
    for name in ("slice", "slice_copy"):
        yield Sample(f"aten.{name}.Tensor", (x, 1, 2, 9))
        yield Sample(f"aten.{name}.Tensor", (x, 0, 0, 7))
        yield Sample(f"aten.{name}.Tensor", (x, -1, -36, 1 << 62))
        yield Sample(f"aten.{name}.Tensor", (x,))
        yield Sample(f"aten.{name}.Tensor", (x, 1, 0, 36, 3))


def _joins() -> Iterator[Sample]:
    booleans = torch.rand(7, 12) < 0.5
    yield Sample("aten.cat.default", ([_x(7, 12), _x(7, 12)], 1))
    yield Sample("aten.cat.default", ([_x(7, 12), _x(7, 12), _x(7, 12)], -1))
    yield Sample("aten.cat.default", ([_x(7, 12), _x(7, 3)], 1))
    yield Sample("aten.cat.default", ([_x(7, 12), _x(5, 12)],))
    yield Sample("aten.cat.default", ([booleans, booleans],))
    yield Sample("aten.cat.default", ([_x(7, 12), _x(7, 12).float()], 1))
    yield Sample("aten.cat.default", ([_x(0), _x(7, 12)], 1))
    yield Sample("aten.cat.default", ([_x(12)],))
    same = _x(4, 12)
    yield Sample("aten.cat.default", ([same, same], 1))
    yield Sample("aten.stack.default", ([_x(7, 12), _x(7, 12)], 1))
    yield Sample("aten.stack.default", ([same, same, same], -1))


def _scatters() -> Iterator[Sample]:
    x = _x(7, 12)
    yield Sample("aten.slice_backward.default", (_x(7, 4), [7, 12], 1, 2, 10, 2))
    yield Sample("aten.slice_backward.default", (x, [7, 12], 1, 0, 1 << 62, 1))
    yield Sample("aten.slice_backward.default", (x, [7, 12], 0, 0, 7, 1))
    yield Sample("aten.select_backward.default", (_x(7, 12), [7, 3, 12], 1, 2))
    yield Sample("aten.select_backward.default", (_x(7, 12), [7, 12, 3], -1, -2))
    yield Sample("aten.slice_scatter.default", (x, _x(7, 4), 1, 2, 6))
    yield Sample("aten.slice_scatter.default", (x, _x(7, 12), 1))
    yield Sample("aten.slice_scatter.default", (x, _x(3, 12), 0, 4))
    yield Sample("aten.select_scatter.default", (x, _x(7), 1, 2))
    yield Sample("aten.select_scatter.default", (_x(7, 3, 12), _x(7, 12), -2, -1))


def _pads() -> Iterator[Sample]:
    x, image = _x(7, 12), _x(4, 7, 5, 12)
    yield Sample("aten.constant_pad_nd.default", (x, [1, 2]))
    yield Sample("aten.constant_pad_nd.default", (x, [0, 0, 1, -2], 0.0))
    yield Sample("aten.constant_pad_nd.default", (x, [0, 1], 3.5))
    yield Sample("aten.constant_pad_nd.default", (image, [0, 0, 2, 2]))
    for name in ("reflection", "replication"):
        yield Sample(f"aten.{name}_pad1d.default", (image[0], [1, 2]))
        yield Sample(f"aten.{name}_pad2d.default", (image, [1, 2, 0, 1]))
        yield Sample(f"aten.{name}_pad3d.default", (_x(4, 3, 4, 2, 3), [1, 2, 0, 1, 1, 1]))
    yield Sample("aten.repeat.default", (x, [1, 3]))
    yield Sample("aten.repeat.default", (x, [2, 1, 1]))
    yield Sample("aten.repeat.default", (_x(12, 1), [1, 4]))
    yield Sample("aten.repeat_interleave.self_int", (x, 3, 1))
    yield Sample("aten.repeat_interleave.self_int", (x, 2, 0))
    yield Sample("aten.repeat_interleave.self_int", (x, 2))
    for name in ("triu", "tril"):
        yield Sample(f"aten.{name}.default", (_x(4, 7, 5, 6),))
        yield Sample(f"aten.{name}.default", (_x(12, 5, 6), -1))
        yield Sample(f"aten.{name}.default", (_x(5, 6), 1))


def _windows() -> Iterator[Sample]:
    x = _x(12, 5, 6, 7)
    for name in ("diagonal", "diagonal_copy"):
        yield Sample(f"aten.{name}.default", (x, 1, 1, 2))
        yield Sample(f"aten.{name}.default", (x, 0, -1, 0))
    yield Sample("aten.diagonal_backward.default", (_x(12, 7, 5), [12, 5, 6, 7], 0, 1, 2))
    for name in ("unfold", "unfold_copy"):
        yield Sample(f"aten.{name}.default", (x, 1, 3, 1))
        yield Sample(f"aten.{name}.default", (x, -1, 2, 2))
    yield Sample("aten.unfold_backward.default", (_x(12, 3, 7, 3), [12, 5, 7], 1, 3, 1))
    pairs = _x(7, 12, 2)
    for copy in ("", "_copy"):
        yield Sample(f"aten.view_as_complex{copy}.default", (pairs,))
        yield Sample(f"aten.view_as_real{copy}.default", (torch.view_as_complex(pairs),))
    yield Sample("aten._fft_r2c.default", (_x(7, 12), [1], 0, True))
    yield Sample("aten._fft_c2c.default", (torch.view_as_complex(_x(4, 7, 12, 2)), [0, 1], 0, True))
    yield Sample("aten._fft_c2r.default", (torch.view_as_complex(pairs), [1], 0, 22))
    for image in (_x(5, 12, 6, 7), _x(12, 5, 6, 7), _x(12, 6, 7)):
        window = ([2, 3], [1, 1], [0, 1], [2, 1])
        found = torch.ops.aten.im2col.default(image, *window)
        yield Sample("aten.im2col.default", (image, *window))
        yield Sample("aten.col2im.default", (found, [6, 7], *window))
    yield Sample("aten.bucketize.Tensor", (_x(7, 12), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)))
    yield Sample("aten.isin.Tensor_Tensor", (torch.randint(9, (7, 12)), torch.tensor([1, 5])))


def _factories() -> Iterator[Sample]:
    x, double = _x(7, 12), {"dtype": torch.float64}
    yield Sample("aten.full.default", ([7, 12], 2.5), double)
    yield Sample("aten.zeros.default", ([7, 12],), double)
    yield Sample("aten.ones.default", ([12],), {"dtype": torch.bool})
    yield Sample("aten.empty.memory_format", ([7, 12],), double, compare=False)
    yield Sample("aten.new_full.default", (x, [4, 7], 2.5), {"dtype": torch.float32})
    yield Sample("aten.new_zeros.default", (x, [13]))
    yield Sample("aten.new_ones.default", (x, [12, 7]))
    yield Sample("aten.new_zeros.default", (x, []))
    yield Sample("aten.new_empty.default", (x, [12]), compare=False)
    yield Sample("aten.full_like.default", (x, 2.5))
    yield Sample("aten.zeros_like.default", (x,), {"dtype": torch.int64})
    yield Sample("aten.ones_like.default", (torch.randint(9, (7, 12)),), {"memory_format": torch.preserve_format})
    yield Sample("aten.empty_like.default", (x,), compare=False)
    yield Sample("aten.arange.default", (12,))
    yield Sample("aten.arange.default", (7,), {"dtype": torch.float32})
    yield Sample("aten.arange.start", (3, 20))
    yield Sample("aten.arange.start_step", (5, -19, -2))
    yield Sample("aten.arange.start_step", (0, 24, 3), {"dtype": torch.float64})
    yield Sample("aten.arange.start", (0.5, 8.5))
    yield Sample("aten.arange.start", (0.5, 8.5), {"dtype": torch.float64})
    yield Sample("aten.arange.start_step", (0, 2, 0.25))
    yield Sample("aten.arange.default", (7.5,))
    yield Sample("aten.arange.start", (3, 9.5))
    yield Sample("aten.arange.start_step", (3, 9.5, 2))


SAMPLES = [*_cuts(), *_joins(), *_scatters(), *_pads(), *_windows(), *_factories()]
