"""Prices of collectives on a made-up cluster, worked out by hand, and their order on any."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster.description import Cluster, Device, Link, Rate
from autopar.cost import bucketed_seconds, bytes_sent, collective_seconds, fan_out
from autopar.cost.collective.algorithms import traffic
from autopar.errors import OptionsError
from autopar.ir.program import COLLECTIVES

DEVICE = Device("chip", {"f32": 1e9}, 1 << 20, 1e8, 1e-6)
BOARD = Link("board", 4, 1000.0, 0.01)
NET = Link("net", None, 100.0, 0.1)
TOY = Cluster("toy", "made up", DEVICE, (BOARD, NET))
TRIED = ("dgx-a100-80gb", "dgx-h100", "p4d.24xlarge", "gb200-nvl72", "tpu-v4", "mi300x")
CLUSTERS = (
    Cluster.get("dgx-a100-80gb"),
    replace(TOY, collective_seconds=0.5),
    replace(TOY, synchronisation_seconds=0.7),
    replace(TOY, links=(BOARD, replace(NET, rates={"all_gather": (Rate(0.2, 90.0), Rate(0.0, 30.0))}))),
)

clusters = st.sampled_from(CLUSTERS)
kinds = st.sampled_from(COLLECTIVES)
meshes = st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3).map(tuple)
sizes = st.integers(0, 1 << 34)


@pytest.mark.parametrize(
    ("mesh", "axes", "fans"),
    [
        ((4,), (0,), (4, 1)),
        ((8,), (0,), (4, 2)),
        ((2, 4), (0,), (1, 2)),
        ((2, 4), (1,), (4, 1)),
        ((2, 4), (0, 1), (4, 2)),
        ((2, 4), (1, 0), (4, 2)),
        ((4, 2), (0,), (2, 2)),  # ranks 0 2 | 4 6
        ((2, 2, 2), (0, 2), (2, 2)),
        ((6,), (0,), (3, 2)),  # four and two
        ((2, 3), (1,), (1.5, 2)),  # 0 1 2, but 3 | 4 5
        ((1, 4), (0,), (1, 1)),
        ((4,), (), (1, 1)),
    ],
)
def test_members_per_level(mesh: tuple[int, ...], axes: tuple[int, ...], fans: tuple[float, ...]) -> None:
    assert fan_out(TOY, mesh, axes) == fans


@pytest.mark.parametrize(
    ("kind", "inside", "across", "both"),
    [
        # 4 on a board: 2 latencies, 3/4 of 1000 bytes at 1000 B/s.
        # 2 over the net: 1 latency, 1/2 of 1000 bytes at 100 B/s.
        ("all_gather", 0.02 + 0.75, 0.1 + 5.0, 0.02 + 0.75 + 0.1 + 1.25),
        ("reduce_scatter", 0.02 + 0.75, 0.1 + 5.0, 0.02 + 0.75 + 0.1 + 1.25),
        ("all_reduce", 0.04 + 1.5, 0.2 + 10.0, 0.04 + 1.5 + 0.2 + 2.5),
        # Each holds 250 (500, 125) bytes and keeps a quarter (half, eighth).
        # Of the 125, 3/8 go to others on the board and half leave it.
        ("all_to_all", 0.02 + 0.1875, 0.1 + 2.5, 0.02 + 0.046875 + 0.1 + 0.625),
    ],
)
def test_prices_by_hand(kind: str, inside: float, across: float, both: float) -> None:
    assert collective_seconds(TOY, (2, 4), kind, (1,), 1000) == pytest.approx(inside)
    assert collective_seconds(TOY, (2, 4), kind, (0,), 1000) == pytest.approx(across)
    assert collective_seconds(TOY, (2, 4), kind, (0, 1), 1000) == pytest.approx(both)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_one_device_is_free(kind: str) -> None:
    assert collective_seconds(CLUSTERS[1], (1, 4), kind, (0,), 1 << 30) == 0.0
    assert bucketed_seconds(CLUSTERS[1], (1, 4), kind, (0,), 10, 100) == 0.0


def test_starting_is_paid_once() -> None:
    ours, free = (collective_seconds(c, (8,), "all_reduce", (0,), 100) for c in (CLUSTERS[1], TOY))
    assert ours == pytest.approx(free + 0.5)


@pytest.mark.parametrize(("mesh", "axes"), [((8,), (0,)), ((2, 4), (0, 1)), ((2, 4), (1,))])
def test_members_wait_for_each_other_once(mesh: tuple[int, ...], axes: tuple[int, ...]) -> None:
    skewed = replace(TOY, synchronisation_seconds=0.7)
    ours, free = (collective_seconds(c, mesh, "reduce_scatter", axes, 100) for c in (skewed, TOY))
    assert ours == pytest.approx(free + 0.7)
    assert collective_seconds(skewed, (1, 4), "reduce_scatter", (0,), 100) == 0.0


def test_the_slower_line_counts() -> None:
    line = Link("l", None, 1.0, 0.0, {"all_gather": (Rate(1.0, 100.0), Rate(0.0, 50.0))})
    cluster = replace(TOY, links=(line,))
    assert collective_seconds(cluster, (2,), "all_gather", (0,), 20) == pytest.approx(1.0 + 0.1)
    assert collective_seconds(cluster, (2,), "all_gather", (0,), 2000) == pytest.approx(20.0)
    assert collective_seconds(cluster, (2,), "reduce_scatter", (0,), 20) == pytest.approx(10.0)


def test_growth_raises_the_steps() -> None:
    cluster = replace(TOY, links=(Link("l", None, 1.0, 0.0, {"all_reduce": (Rate(1.0, math.inf, 3.0),)}),))
    assert [collective_seconds(cluster, (n,), "all_reduce", (0,), 9) for n in (2, 4, 8)] == [2.0, 16.0, 54.0]


@given(clusters, meshes, kinds, sizes, sizes)
def test_monotone_in_bytes(cluster: Cluster, mesh: tuple[int, ...], kind: str, one: int, other: int) -> None:
    axes = tuple(range(len(mesh)))
    small, large = sorted((one, other))
    assert collective_seconds(cluster, mesh, kind, axes, small) <= collective_seconds(cluster, mesh, kind, axes, large)
    bucket = [bucketed_seconds(cluster, mesh, kind, axes, size, 1 << 20) for size in (small, large)]
    assert bucket[0] <= bucket[1]


@given(clusters, meshes, kinds, sizes, sizes)
def test_together_is_no_dearer_than_apart(
    cluster: Cluster, mesh: tuple[int, ...], kind: str, one: int, other: int
) -> None:
    price = [collective_seconds(cluster, mesh, kind, (0,), size) for size in (one, other, one + other)]
    assert price[2] <= (price[0] + price[1]) * (1 + 1e-12)


@given(st.sampled_from(CLUSTERS[1:]), meshes.filter(lambda mesh: len(mesh) > 1), sizes)
def test_two_axes_at_once_are_no_dearer_than_one_after_the_other(
    cluster: Cluster, mesh: tuple[int, ...], nbytes: int
) -> None:
    for axes in itertools.permutations(range(len(mesh)), 2):
        first, second = axes
        degree = mesh[second]

        def price(kind: str, over: tuple[int, ...], size: float) -> float:
            return collective_seconds(cluster, mesh, kind, over, size)

        apart = price("all_reduce", (first,), nbytes) + price("all_reduce", (second,), nbytes)
        assert price("all_reduce", axes, nbytes) <= apart * (1 + 1e-9)
        # The second all-gather puts out the whole tensor, the first only the part its group shares.
        for kind in ("all_gather", "reduce_scatter"):
            apart = price(kind, (first,), nbytes / degree) + price(kind, (second,), nbytes)
            assert price(kind, axes, nbytes) <= apart * (1 + 1e-9)
        local = nbytes / mesh[first] / mesh[second]
        apart = sum(price("all_to_all", (axis,), local * mesh[axis]) for axis in axes)
        assert price("all_to_all", axes, nbytes) <= apart * (1 + 1e-9)


@given(clusters, meshes, kinds, sizes, st.integers(1, 1 << 30))
def test_a_share_of_a_bucket(cluster: Cluster, mesh: tuple[int, ...], kind: str, nbytes: int, bucket: int) -> None:
    alone = collective_seconds(cluster, mesh, kind, (0,), nbytes)
    share = bucketed_seconds(cluster, mesh, kind, (0,), nbytes, bucket)
    assert share <= alone * (1 + 1e-12)
    if nbytes >= bucket:
        assert share == alone


def test_shares_fill_a_bucket() -> None:
    whole = collective_seconds(TOY, (8,), "all_reduce", (0,), 1000)
    shares = [bucketed_seconds(TOY, (8,), "all_reduce", (0,), size, 1000) for size in (100, 250, 650)]
    assert sum(shares) == pytest.approx(whole)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_every_byte_crosses_one_level(fans: list[int]) -> None:
    """Level by level a device sends what it would in one ring of all: (N-1)/N of the tensor, of its own part
    in an all-to-all."""
    members = math.prod(fans)
    for kind, whole in (("reduce_scatter", 1.0), ("all_reduce", 2.0), ("all_to_all", 1.0 / members)):
        sent = sum(traffic(kind, fan, math.prod(fans[:level]), members) for level, fan in enumerate(fans))
        assert sent == pytest.approx(whole * (members - 1) / members)


@pytest.mark.parametrize(
    ("name", "mesh", "axes", "measured"),
    [
        ("dgx-a100-80gb", (8, 8), (1,), 222.72),  # ml-engineering, 8 x A100, 512 MiB
        ("dgx-a100-80gb", (2, 8), (0, 1), 192.0),  # NVIDIA in NCCL's issue 812: two DGX A100
        ("dgx-h200", (8,), (0,), 450.29),  # ml-engineering, 8 x H200, the switch adding up
        ("dgx-h200", (2, 4), (1,), 363.3),  # four of them: the ring is quicker
    ],
)
def test_bus_bandwidths_are_those_measured(
    name: str, mesh: tuple[int, ...], axes: tuple[int, ...], measured: float
) -> None:
    members, size = math.prod(mesh[axis] for axis in axes), 512 << 20
    seconds = collective_seconds(Cluster.get(name), mesh, "all_reduce", axes, size)
    assert 2 * (members - 1) / members * size / seconds / 1e9 == pytest.approx(measured, rel=0.08)


def test_errors() -> None:
    with pytest.raises(OptionsError, match="'broadcast' is not a collective; one of all_reduce"):
        collective_seconds(TOY, (4,), "broadcast", (0,), 1)
    with pytest.raises(OptionsError, match=r"axes \(1,\) are not distinct axes of the mesh \(4,\)"):
        collective_seconds(TOY, (4,), "all_reduce", (1,), 1)
    with pytest.raises(OptionsError, match=r"axes \(0, 0\)"):
        collective_seconds(TOY, (4,), "all_reduce", (0, 0), 1)
    with pytest.raises(OptionsError, match=r"mesh \(2, 4\) needs 8 devices; cluster 'toy' has 4"):
        collective_seconds(replace(TOY, links=(BOARD,)), (2, 4), "all_reduce", (0,), 1)
    with pytest.raises(OptionsError, match="without devices"):
        collective_seconds(TOY, (0, 4), "all_reduce", (0,), 1)


presets = st.sampled_from([Cluster.get(name) for name in TRIED])


@given(presets, meshes, kinds, sizes, sizes)
def test_presets_grow_with_bytes_and_gain_nothing_by_splitting(
    cluster: Cluster, mesh: tuple[int, ...], kind: str, one: int, other: int
) -> None:
    axes = tuple(range(len(mesh)))
    price = [collective_seconds(cluster, mesh, kind, axes, size) for size in (one, other, one + other)]
    assert max(price[:2]) <= price[2] <= (price[0] + price[1]) * (1 + 1e-12)


@given(
    presets.filter(lambda cluster: not cluster.links[0].torus),  # More dims of a torus are quicker than one.
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]),
    st.integers(1, 256),
    sizes,
)
def test_more_devices_are_no_quicker(cluster: Cluster, kind: str, members: int, nbytes: int) -> None:
    """The same tensor gathered or reduced by a larger group, of whole nodes where it is more than one."""
    inner = cluster.links[0]
    node = inner.size or 1
    groups = [min(members, node), node * -(-members // node), 2 * node * -(-members // node)]
    price = [collective_seconds(cluster, (count,), kind, (0,), nbytes) for count in groups]
    # Two devices of eight that are joined by a link for each pair use one of seven.
    assert price[0] <= price[1] * (1 + 1e-9) or inner.pair_bandwidth < inner.bandwidth / 2
    assert price[1] <= price[2] * (1 + 1e-9)


@given(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]), st.sampled_from([2, 4, 16]), sizes)
def test_knowing_the_node_is_no_worse_than_one_ring_over_the_slow_link(kind: str, nodes: int, nbytes: int) -> None:
    slow = Link("net", None, 100.0, 0.1)
    ours, flat = (replace(TOY, links=links, algorithms=("ring", "tree")) for links in ((BOARD, slow), (slow,)))
    price = [collective_seconds(cluster, (4 * nodes,), kind, (0,), nbytes) for cluster in (ours, flat)]
    assert price[0] <= price[1] * (1 + 1e-12)


def test_groups_share_the_adapters_of_their_node() -> None:
    """Four devices with two adapters: each of four groups has half of one, one group of all has both."""
    net = replace(NET, adapters=2)
    cluster = replace(TOY, links=(replace(BOARD, bandwidth=1e6), net), algorithms=("ring",))
    alone = replace(cluster, links=(cluster.links[0], replace(NET, bandwidth=50.0)))
    for mesh, axes in (((2, 4), (0,)), ((8,), (0,))):
        price = [collective_seconds(c, mesh, "all_gather", axes, 1e6) for c in (cluster, alone)]
        assert price[0] == pytest.approx(price[1])
    ring = 7 / 8 * 1e6 / (2 * 100.0) + 6 * 0.01 + 0.1  # six steps on boards, one between them
    assert collective_seconds(cluster, (8,), "all_gather", (0,), 1e6) == pytest.approx(ring)


def test_pieces_sent_directly_cross_the_slow_link_for_each_device_behind_it() -> None:
    """Two boards of four devices, one adapter each: every device sends its eighth to all four of the other board."""
    cluster = replace(TOY, links=(replace(BOARD, bandwidth=1e9), replace(NET, adapters=1)), algorithms=("direct",))
    latencies, eighths = 3 * 0.01 + 4 * 0.1, 4 * 1e6 / 8 / (100.0 / 4)
    for kind, often in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        seconds = collective_seconds(cluster, (8,), kind, (0,), 1e6)
        assert seconds == pytest.approx(often * (latencies + eighths))


def test_an_oversubscribed_stage_is_as_many_times_slower() -> None:
    stages = [Link("spine", None, 100.0, 0.0, oversubscription=times) for times in (1.0, 7.0)]
    price = [
        collective_seconds(replace(TOY, links=(BOARD, stage)), (2, 4), "all_gather", (0,), 1e6) for stage in stages
    ]
    assert price[1] == pytest.approx(7 * price[0])


def test_every_dim_of_a_torus_carries_its_part() -> None:
    torus = Link("ici", 16, 100.0, 0.0, torus=(4, 4))
    cluster = replace(TOY, links=(torus,), algorithms=("ring",))
    price = [collective_seconds(cluster, (4, 4), "all_gather", axes, 1600) for axes in ((1,), (0,), (0, 1))]
    assert price == pytest.approx([3 / 4 * 16, 3 / 4 * 16, 15 / 16 * 16 / 2])


def test_pairs_have_the_links_between_them_only() -> None:
    """Seven links of 10 bytes/s to seven others: two devices use one, eight all."""
    cluster = replace(TOY, links=(Link("mesh", 8, 70.0, 0.0, pair_bandwidth=10.0),), algorithms=("ring",))
    price = [collective_seconds(cluster, (n,), "all_gather", (0,), 700) for n in (2, 4, 8)]
    assert price == pytest.approx([350 / 10, 525 / 30, 612.5 / 70])


def test_a_switch_that_adds_up_halves_the_traffic() -> None:
    rates = (Rate(0.0, 100.0), Rate(0.0, 100.0, algorithm="nvls"))
    cluster = replace(TOY, links=(Link("switch", 8, 100.0, 0.0, {"all_reduce": rates}),), algorithms=("ring", "nvls"))
    assert collective_seconds(cluster, (8,), "all_reduce", (0,), 800) == pytest.approx(8.0)
    without = replace(cluster, algorithms=("ring",))
    assert collective_seconds(without, (8,), "all_reduce", (0,), 800) == pytest.approx(14.0)


@given(st.floats(0, 1e9), st.floats(0, 1e3))
def test_small_messages_ramp_up(nbytes: float, ramp: float) -> None:
    line = Link("l", None, 100.0, 0.0, {"all_gather": (Rate(0.0, 100.0, ramp=ramp),)})
    seconds = collective_seconds(replace(TOY, links=(line,)), (2,), "all_gather", (0,), nbytes)
    assert seconds == pytest.approx(nbytes / 200 + 2 * math.sqrt(ramp * nbytes / 200))


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_volumes_are_expressions_of_mesh_degrees(kind: str) -> None:
    members, batch = sympy.symbols("n b", positive=True, integer=True)
    volume = bytes_sent(kind, 4 * batch, members)
    assert volume.free_symbols == {members, batch}
    for n, b in ((2, 3), (8, 64)):
        assert float(volume.subs({members: n, batch: b})) == pytest.approx(float(bytes_sent(kind, 4 * b, n)))
        assert float(bytes_sent(kind, 4 * b, n)) == pytest.approx(traffic(kind, n) * 4 * b)
