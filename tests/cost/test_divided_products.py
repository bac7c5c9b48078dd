"""Products whose inner dim is divided among processors: what they cost, and which ones are left as they are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster.description import Cluster, Device
from autopar.cost.compute.matmul_efficiency import TILES, product_seconds
from benchmarks.hardware_rows import ProductRow, product_rows
from benchmarks.prices import price_product

RATE = 4e14
FOUR_TILES = ("H100-SXM", "tf32", 1, (256, 256, 4096))
GPUS = ("dgx-h100", "dgx-a100-80gb", "dgx-b200", "dgx-v100", "mi300x")


def gpu(name: str) -> Device:
    return Cluster.get(name).device


def undivided(device: Device, batch: float, matrix: tuple[int, int, int], itemsize: int = 2) -> float:
    """Seconds if each tile's processor does all of the inner dim: a second kernel would take forever."""
    return product_seconds(replace(device, launch_seconds=1e9), RATE, batch, matrix, itemsize)


def test_a_deep_product_of_few_tiles_takes_its_time_several_parts_and_a_second_kernel() -> None:
    """One tile of 64 x 64 in ten parts, all that ten processors can do; each part is written and read in 4 bytes."""
    device = Device("", {"bf16": RATE}, 1, 1e12, 1e-6, processors=10, tile_depth=32, tile_border=16)
    part = 2 * 64 * 64 * (50000 / 10 + 32 / 2) * (1 + 16 / 64 * 2) / (RATE / 10)
    sums = 10 * 8 * 64 * 64 / 1e12
    assert product_seconds(device, RATE, 1, (64, 64, 50000)) == pytest.approx(part + sums + 0.5e-6)
    # Four products leave two processors to each: two parts, and two processors idle.
    part = 2 * 64 * 64 * (50000 / 2 + 32 / 2) * (1 + 16 / 64 * 2) / (RATE / 10)
    sums = 4 * 2 * 8 * 64 * 64 / 1e12
    assert product_seconds(device, RATE, 4, (64, 64, 50000)) == pytest.approx(part + sums + 0.5e-6)
    assert product_seconds(device, RATE, 6, (64, 64, 50000)) == undivided(device, 6, (64, 64, 50000))
    # Where sums are dear, parts are fewer: as many as make both terms equal.
    slow = replace(device, memory_bandwidth=1e10)
    deep, more = 2 * 64 * 64 * 1.5 / (RATE / 10), 8 * 64 * 64 / 1e10
    best = 2 * math.sqrt(deep * 50000 * more) + deep * 16 + 0.5e-6
    assert product_seconds(slow, RATE, 1, (64, 64, 50000)) == pytest.approx(best)
    # Sums of elements of eight bytes are no shorter.
    twice = product_seconds(replace(device, memory_bandwidth=2e12), RATE, 1, (64, 64, 50000), 8)
    assert twice == product_seconds(device, RATE, 1, (64, 64, 50000), 8) - 10 * 8 * 64 * 64 / 1e12


@pytest.mark.parametrize("name", GPUS)
def test_the_backward_of_a_head_of_few_tokens_uses_the_processors_of_a_gpu(name: str) -> None:
    head = (64, 96, 50257)
    assert product_seconds(gpu(name), RATE, 1, head) < undivided(gpu(name), 1, head) / 10


@pytest.mark.parametrize("name", GPUS)
def test_shallow_products_and_those_of_many_tiles_are_not_divided(name: str) -> None:
    device = gpu(name)
    largest = TILES[0]
    for m, n in ((64, 64), (512, 512), (1024, 4096), (8192, 8192)):
        assert product_seconds(device, RATE, 1, (m, n, 256)) == undivided(device, 1, (m, n, 256))
    many = device.processors // 2 + 1
    for matrix in ((largest[0] * many, 96, 50257), (64, largest[1] * many, 50257), (4096, 16384, 16384)):
        assert product_seconds(device, RATE, 1, matrix) == undivided(device, 1, matrix)
    assert product_seconds(device, RATE, many, (64, 64, 50257)) == undivided(device, many, (64, 64, 50257))


shallow, deep = st.integers(1, 3000), st.integers(1, 200_000)


@given(
    st.sampled_from(GPUS),
    st.tuples(st.integers(1, 80), shallow, shallow, deep),
    st.integers(0, 3),
    st.floats(0, 1),
    st.sampled_from([1, 2, 4]),
)
def test_neither_smaller_nor_fewer_products_are_dearer_and_none_is_quicker_than_the_rate(
    name: str, product: tuple[int, int, int, int], which: int, share: float, itemsize: int
) -> None:
    batch, *matrix = product
    device = gpu(name)
    whole = product_seconds(device, RATE, batch, (matrix[0], matrix[1], matrix[2]), itemsize)
    assert whole <= undivided(device, batch, (matrix[0], matrix[1], matrix[2]), itemsize)
    assert whole >= 2.0 * math.prod(product) / RATE * (1 - 1e-12)
    less = list(product)
    less[which] = max(1, math.floor(less[which] * share))
    assert product_seconds(device, RATE, less[0], (less[1], less[2], less[3]), itemsize) <= whole * (1 + 1e-12)


@given(st.sampled_from(GPUS), shallow, shallow, deep, st.integers(1, 5000))
def test_a_deeper_product_is_dearer_by_no_more_than_its_depth(name: str, m: int, n: int, k: int, more: int) -> None:
    """So there is no step where dividing begins."""
    before, after = (product_seconds(gpu(name), RATE, 1, (m, n, depth)) for depth in (k, k + more))
    assert after <= before * (k + more) / k * (1 + 1e-12)


def few_tiles(row: ProductRow) -> bool:
    m, n, k = row.matrix
    return row.batch * math.ceil(m / 128) * math.ceil(n / 128) <= 66 and k >= 1024


def test_published_products_of_few_tiles_are_priced_as_measured() -> None:
    rows = [row for row in product_rows() if row.source.startswith("XLA") and few_tiles(row)]
    errors = {dtype: [price_product(row).error for row in rows if row.dtype == dtype] for dtype in ("bf16", "tf32")}
    assert len(errors["bf16"]) == len(errors["tf32"]) == 112
    assert sum(errors["bf16"]) / 112 < 0.066  # 0.067 if none is divided.
    assert sum(errors["tf32"]) / 112 < 0.195  # 0.237
    (four,) = (row for row in rows if (row.gpu, row.dtype, row.batch, row.matrix) == FOUR_TILES)
    assert price_product(four).predicted < 0.65 * 23.8e-6  # One processor for each tile would take 23.8; it took 8.8.
