"""Cluster descriptions: text form, names, and errors that say what to change."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster.description import Cluster, Device, Link, Rate, local_file, machine_memory
from autopar.cluster.presets import PRESETS
from autopar.cost import collective_seconds, compute_seconds
from autopar.errors import OptionsError
from autopar.ir.program import COLLECTIVES

TOY = Cluster(
    "toy",
    "made up",
    Device("chip", {"f32": 1e9, "bf16": 4e9}, 1 << 20, 1e8, 1e-6),
    (Link("board", 4, 1e8, 1e-6), Link("net", None, 1e7, 1e-5)),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_preset_round_trips(name: str, cache: Path) -> None:
    cluster = Cluster.get(name)
    assert cluster.name == name
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    assert hash(Cluster.from_toml(cluster.to_toml())) == hash(cluster)


positive = st.floats(1e-9, 1e15, allow_nan=False)
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20)
rates = st.lists(st.builds(Rate, positive, positive | st.just(math.inf), positive), min_size=1, max_size=2)


@given(
    texts,
    texts,
    st.dictionaries(st.sampled_from(["f32", "bf16", "f64"]), positive, min_size=1),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.dictionaries(st.sampled_from(COLLECTIVES), rates.map(tuple)),
    st.booleans(),
)
def test_any_cluster_round_trips(
    name: str,
    source: str,
    peak: dict[str, float],
    fans: list[int],
    kinds: dict[str, tuple[Rate, ...]],
    unbounded: bool,
) -> None:
    sizes = [math.prod(fans[: i + 1]) for i in range(len(fans))]
    links = tuple(Link(f"level {i}", size, 1e9 / (i + 1), 1e-6, kinds) for i, size in enumerate(sizes))
    links += (Link("out", None, 1.0, 0.0),) if unbounded else ()
    device = Device(name, peak, 12, 1e9, 1e-6, 0.0, 0.5, 3.0, 1, 0.25)
    cluster = Cluster(name, source, device, links, 1e-6, {"odd key": 1.0}, 2e-3)
    assert Cluster.from_toml(cluster.to_toml()) == cluster


def test_a_cluster_is_its_own_description() -> None:
    assert Cluster.get(TOY) is TOY


def test_get_reads_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(TOY.to_toml())
    assert Cluster.get(tmp_path / "mine.toml") == TOY
    assert Cluster.get(str(tmp_path / "mine.toml")) == TOY


def test_unknown_name_lists_names_and_the_way_out() -> None:
    with pytest.raises(OptionsError, match=r"dgx-a100-80gb, .*local.*autopar calibrate.*to_toml"):
        Cluster.get("dgx-a100")


def test_local_says_that_it_is_shipped_then_where_it_was_read(cache: Path) -> None:
    shipped = Cluster.get("local")
    assert "shipped defaults" in shipped.source
    assert shipped.device.memory_bytes == machine_memory() // 4
    assert local_file() == cache / "local.toml"
    local_file().write_text(replace(TOY, name="local").to_toml())
    measured = Cluster.get("local")
    assert measured.source == f"made up; read from {cache / 'local.toml'}"
    assert measured.links == TOY.links


def test_other_calibrations_are_found_by_name(cache: Path) -> None:
    local_file("local-gpu").write_text(TOY.to_toml())
    assert Cluster.get("local-gpu").device == TOY.device


def test_links_fall_back_to_their_own_rate() -> None:
    link = Link("gloo", None, 1e9, 1e-3, {"all_gather": (Rate(2e-3, 2e8),)})
    assert link.lines("all_reduce") == (Rate(1e-3, 1e9),)
    assert link.lines("all_gather") == (Rate(2e-3, 2e8),)


def test_unknown_dtype_runs_at_the_slowest_rate() -> None:
    assert TOY.device.flops(torch.bfloat16) == 4e9
    assert TOY.device.flops(torch.float64) == 1e9
    assert TOY.device.flops(torch.uint16) == 1e9


def test_clusters_that_differ_anywhere_differ() -> None:
    slower = replace(TOY, device=replace(TOY.device, launch_seconds=2e-6))
    assert slower != TOY
    assert hash(slower) != hash(TOY)


def test_comments_and_single_rates_are_read() -> None:
    text = TOY.to_toml() + "\n[links.rates]  # of the net\nall_gather = {latency = 1, bandwidth = 2}\n"
    assert Cluster.from_toml(text).links[-1].lines("all_gather") == (Rate(1.0, 2.0),)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "toy"', "name = ", "mine.toml is not TOML"),
        ('name = "toy"', "name = 3", "mine.toml: name is 3, not a string"),
        ('source = "made up"\n', "", "mine.toml lacks source"),
        ("launch_seconds", "launch", "mine.toml: device has unknown keys launch; known are name, peak_flops"),
        ("memory_bytes = 1048576", "memory_bytes = 1e6", r"memory_bytes is 1000000.0, not a whole number"),
        ("f32 = 1000000000.0", 'f32 = "fast"', r"peak_flops.f32 is 'fast', not a number"),
        ("f32 =", "f23 =", r"unknown dtypes \['f23'\]; write f32"),
        ("f32 = 1000000000.0", "f32 = 0", "f32 is 0.0, not a positive number"),
        ("size = 4", "size = 0", "size 0 is not a number of devices"),
        ("size = 4\n", "", "'board' has no size, so it joins any number of devices, and no link can lie outside it"),
        ("size = 4", "size = true", "size is True, not a whole number"),
        (
            "bandwidth = 100000000.0\nlatency",
            "bandwidth = -1\nlatency",
            "'board': bandwidth -1.0 is not a positive number",
        ),
        ("reserve_fraction = 0.0", "reserve_fraction = 1", r"reserve_fraction is not in \[0, 1\)"),
        (
            "synchronisation_seconds = 0.0",
            "synchronisation_seconds = -1",
            "synchronisation_seconds -1.0 is not a number",
        ),
        (
            "memory_bandwidth = 100000000.0",
            "memory_bandwidth = inf",
            "memory_bandwidth is inf, not a positive",
        ),
        (
            "launch_seconds = 1e-06",
            "launch_seconds = nan",
            "launch_seconds is nan, not a number of at least 0",
        ),
        ("f32 = 1000000000.0", f"f32 = 1{'0' * 400}", "f32 is a number of 401 digits, too large"),
        ("[device]", "[devices]", "mine.toml has unknown keys devices"),
    ],
)
def test_broken_descriptions_name_the_key(old: str, new: str, message: str) -> None:
    text = TOY.to_toml()
    assert old in text
    with pytest.raises(OptionsError, match=message):
        Cluster.from_toml(text.replace(old, new), "mine.toml")


def test_what_is_no_description_is_said(tmp_path: Path) -> None:
    path = tmp_path / "noise.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionsError, match=r"cannot read the cluster '.*noise.toml': byte"):
        Cluster.get(path)
    with pytest.raises(OptionsError, match="5 is not a cluster: give a Cluster, a name or a file"):
        Cluster.get(5)  # type: ignore[arg-type]
    links = TOY.to_toml().partition("[[links]]")[0]
    with pytest.raises(OptionsError, match=r"mine.toml: links\[0\] is 1, not a table"):
        Cluster.from_toml(f"links = [1, 2]\n{links}", "mine.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_bytes = 1048576", "memory_bytes = 80", "memory_bytes is 80 bytes; is it meant in other units"),
        ("bf16 = 4000000000.0", "bf16 = 312", "peak_flops.bf16 is 312.0 FLOP per second"),
        ("bandwidth = 10000000.0", "bandwidth = 25", "link 'net': bandwidth is 25.0 bytes per second"),
        ("latency = 1e-05", "latency = 5", "link 'net': latency is 5.0 seconds; write 5e-6 for 5 microseconds"),
        ("collective_seconds = 0.0", "collective_seconds = 5", "collective_seconds is 5.0 seconds"),
        ("host_seconds = 0.0", "host_seconds = 30", "device: host_seconds is 30.0 seconds"),
        (
            "host_bandwidth = 0.0\nhost_memory_bytes = 0",
            "host_bandwidth = 1e10\nhost_memory_bytes = 256",
            "host_memory_bytes is 256 bytes",
        ),
        ("reserve_bytes = 0", "reserve_bytes = 2000000", "reserve_bytes is 2000000 of 1048576 bytes of memory"),
        ("latency = 1e-05", "latency = 1e-05\npair_bandwidth = 25", "link 'net': pair_bandwidth is 25.0 bytes"),
        (
            "latency = 1e-05",
            "latency = 1e-05\nrates = {message = {latency = 1e-5, bandwidth = 25}}",
            "link 'net': rates.message: bandwidth is 25.0 bytes per second",
        ),
    ],
)
def test_figures_in_other_units_are_noticed(old: str, new: str, message: str, tmp_path: Path) -> None:
    path, text = tmp_path / "mine.toml", TOY.to_toml()
    assert old in text
    path.write_text(text)
    assert Cluster.get(path) == TOY
    path.write_text(text.replace(old, new))
    with pytest.raises(OptionsError, match=message):
        Cluster.get(path)


def test_links_must_nest() -> None:
    with pytest.raises(OptionsError, match="'b' joins 6 devices and 'a' inside it 4"):
        replace(TOY, links=(Link("a", 4, 1.0, 0.0), Link("b", 6, 1.0, 0.0)))


@pytest.mark.parametrize("kind", ["allreduce", "broadcast"])
def test_rates_are_of_known_collectives(kind: str) -> None:
    with pytest.raises(OptionsError, match=f"'{kind}' is not a collective; one of all_reduce"):
        Link("a", 4, 1.0, 0.0, {kind: (Rate(0.0, 1.0),)})


@pytest.mark.parametrize("rate", [(-1.0, 1.0, 1.0), (math.inf, 1.0, 1.0), (0.0, 0.0, 1.0), (0.0, 1.0, 0.0)])
def test_rates_are_positive(rate: tuple[float, float, float]) -> None:
    with pytest.raises(OptionsError, match="not"):
        Rate(*rate)


def test_nodes_of_another_size_keep_their_adapters() -> None:
    whole, half = Cluster.get("p4d.24xlarge"), Cluster.get("p4d.24xlarge").with_node(4)
    assert (half.links[0].size, half.links[1].adapters) == (4, 4)
    assert half.links[1].share(4) == 2 * whole.links[1].share(8)


def test_a_cluster_of_so_many_devices() -> None:
    assert [link.size for link in Cluster.get("dgx-h100").of_devices(64).links] == [8, 64]
    assert [link.size for link in Cluster.get("dgx-h100").of_devices(4).links] == [4]
    assert Cluster.get("tpu-v4").of_devices(64).links[0].torus == (16, 4, 1)
    with pytest.raises(OptionsError, match="'toy' has 4 devices, not 8"):
        replace(TOY, links=TOY.links[:1]).of_devices(8)
    with pytest.raises(OptionsError, match="24 devices are not a block of the torus 16 x 16 x 16"):
        Cluster.get("tpu-v4").of_devices(24)


def test_a_torus_has_as_many_places_as_devices() -> None:
    with pytest.raises(OptionsError, match="'t' joins 4 blocks, its torus 2 x 4 has 8"):
        replace(TOY, links=(Link("t", 4, 1.0, 0.0, torus=(2, 4)),))


def test_algorithms_are_known() -> None:
    with pytest.raises(OptionsError, match="'toy': 'butterfly' is not an algorithm; one of ring"):
        replace(TOY, algorithms=("butterfly",))


EARLIER = """
name = "mine"
source = "written for an earlier version"
collective_seconds = 10e-6

[device]
name = "A100"
memory_bytes = 84987740160
memory_bandwidth = 1.75e12
launch_seconds = 4e-6
matmul_efficiency = 0.8
matmul_padding = 48

[device.peak_flops]
bf16 = 312e12

[[links]]
name = "nvswitch"
size = 8
bandwidth = 235e9
latency = 2e-6

[[links]]
name = "infiniband"
bandwidth = 23e9
latency = 5e-6
"""


def test_files_of_earlier_versions_are_priced_as_they_were() -> None:
    cluster, size = Cluster.from_toml(EARLIER), 64 << 20
    assert (cluster.algorithms, cluster.overlaps, cluster.links[1].share(8)) == ((), False, 1.0)
    price = [collective_seconds(cluster, (8, 8), "all_reduce", axes, size) for axes in ((1,), (0,), (0, 1))]
    assert price == pytest.approx([521.8e-6, 5146e-6, 1191e-6], rel=1e-3)
    seconds = compute_seconds(cluster, 2 * 512**3, 0, torch.bfloat16, (512, 512, 512))
    assert seconds == pytest.approx(4e-6 + 2 * 560**3 / (0.8 * 312e12))
