"""Levels of links of the presets, as ``[[links]]`` tables of a cluster's TOML. ``docs/cost-model.md`` gives the source
of each number, and says which were fitted.

Networks between nodes are described per adapter: :func:`network` takes how many a node has and what each carries.
"""

from __future__ import annotations

NVLINK_V100 = """
[[links]]                       # six NVLinks of 25 GB/s each way, no switch: four lie within each half of a node, so
name = "nvlink"                 # that three neighbours have 94 GB/s of each device; 0 and 1 (4 and 5) are joined by
size = 8                        # one, 2 and 3 (6 and 7) by two, and the pair with one takes longest
bandwidth = 130e9
pair_bandwidth = 23.5e9
latency = 2.7e-6

[links.rates]
all_gather = {latency = 2.7e-6, bandwidth = 130e9, start = 12e-6, ramp = 4e-6}
reduce_scatter = {latency = 2.7e-6, bandwidth = 130e9, start = 12e-6, ramp = 4e-6}
all_reduce = {latency = 5.1e-6, bandwidth = 130e9, start = 12e-6, ramp = 8.6e-6}
all_to_all = {latency = 0.6e-6, bandwidth = 60e9, start = 34e-6, ramp = 5e-6}
message = {latency = 10e-6, bandwidth = 40e9}
"""

NVSWITCH_A100 = """
[[links]]                       # 12 NVLinks of 25 GB/s each way
name = "nvswitch"
size = 8
bandwidth = 241e9
latency = 2.7e-6

[links.rates]
all_gather = {latency = 2.7e-6, bandwidth = 241e9, start = 12e-6, ramp = 4e-6}
reduce_scatter = {latency = 2.7e-6, bandwidth = 241e9, start = 12e-6, ramp = 4e-6}
all_reduce = {latency = 5.1e-6, bandwidth = 241e9, start = 12e-6, ramp = 8.6e-6}
all_to_all = {latency = 0.6e-6, bandwidth = 230e9, start = 34e-6, ramp = 3e-6}
message = {latency = 12e-6, bandwidth = 165e9}
"""

NVSWITCH_H100 = """
[[links]]                       # 18 NVLinks of 25 GB/s each way
name = "nvswitch"
size = 8
bandwidth = 379e9
pair_bandwidth = 275e9
latency = 2.7e-6

[links.rates]
all_gather = {latency = 2.7e-6, bandwidth = 379e9, start = 8.5e-6, ramp = 2.4e-6}
reduce_scatter = {latency = 2.7e-6, bandwidth = 379e9, start = 8.5e-6, ramp = 2.4e-6}
all_to_all = {latency = 0.6e-6, bandwidth = 345e9, start = 34e-6, ramp = 1e-6}
message = {latency = 12e-6, bandwidth = 250e9}
all_reduce = [
    {latency = 4.45e-6, bandwidth = 379e9, start = 8.4e-6, ramp = 2.4e-6},
    {latency = 8.9e-6, bandwidth = 276e9, start = 8.4e-6, ramp = 8.2e-6, algorithm = "nvls"},
]
"""

NVSWITCH_B200 = """
[[links]]                       # 18 NVLinks of 50 GB/s each way
name = "nvswitch"
size = 8
bandwidth = 650e9
pair_bandwidth = 442e9
latency = 2.4e-6

[links.rates]
all_gather = {latency = 2.4e-6, bandwidth = 650e9, start = 19e-6, ramp = 1e-6}
reduce_scatter = {latency = 2.4e-6, bandwidth = 650e9, start = 19e-6, ramp = 1e-6}
all_to_all = {latency = 0.66e-6, bandwidth = 750e9, start = 26e-6, ramp = 13e-6}
message = {latency = 20e-6, bandwidth = 500e9}
all_reduce = [
    {latency = 6.2e-6, bandwidth = 650e9, start = 11e-6, ramp = 1e-6},
    {latency = 12.3e-6, bandwidth = 462e9, start = 11e-6, ramp = 10.5e-6, algorithm = "nvls"},
]
"""

NVSWITCH_GB200 = """
[[links]]                       # 18 NVLinks of 50 GB/s each way, through switches that join the rack
name = "nvswitch"
size = 72
bandwidth = 685e9
latency = 1.34e-6

[links.rates]
all_gather = {latency = 1.34e-6, bandwidth = 685e9, start = 8.5e-6, ramp = 1.1e-6}
reduce_scatter = {latency = 1.34e-6, bandwidth = 685e9, start = 8.5e-6, ramp = 1.1e-6}
all_to_all = {latency = 0.57e-6, bandwidth = 670e9, start = 6.5e-6, ramp = 5.1e-6}
message = {latency = 12e-6, bandwidth = 650e9}
all_reduce = [
    {latency = 4.95e-6, bandwidth = 685e9, ramp = 1.1e-6},
    {latency = 9.9e-6, bandwidth = 520e9, ramp = 47e-6, algorithm = "nvls"},
]
"""

XGMI_MI300X = """
[[links]]                       # seven links of 64 GB/s each way, one to each other device
name = "xgmi"
size = 8
bandwidth = 336e9
pair_bandwidth = 48e9
latency = 9e-6

[links.rates]
all_gather = {latency = 8.9e-6, bandwidth = 340e9, start = 171e-6, ramp = 0.3e-6}
reduce_scatter = {latency = 8.9e-6, bandwidth = 340e9, start = 171e-6, ramp = 0.3e-6}
all_reduce = {latency = 8.8e-6, bandwidth = 340e9, start = 122e-6, ramp = 2.7e-6}
all_to_all = {latency = 8.1e-6, bandwidth = 310e9, start = 342e-6}
message = {latency = 123e-6, bandwidth = 50e9}
"""

XGMI_MI250X = """
[[links]]                       # dies of a package 200 GB/s each way, packages 50 to 100
name = "xgmi"
size = 8
bandwidth = 75e9
latency = 30e-6

[links.rates]
all_gather = {latency = 35e-6, bandwidth = 57e9, start = 200e-6}
reduce_scatter = {latency = 48e-6, bandwidth = 57e9, start = 157e-6}
all_reduce = {latency = 16e-6, bandwidth = 80e9, start = 56e-6}
all_to_all = {latency = 14e-6, bandwidth = 92e9, start = 201e-6}
"""


def network(
    name: str,
    adapters: int,
    gigabits: float,
    latency: float = 5e-6,
    start: float = 0.0,
    ramp: float = 0.0,
    more: str = "",
) -> str:
    """The level that joins any number of nodes. Each node has ``adapters`` of ``gigabits`` per second each way, of
    which a collective reaches 95%. A step takes ``latency`` seconds, less in an all-to-all, which has many messages in
    flight. ``more``: further keys of the table."""
    bandwidth = f"bandwidth = {0.95 * gigabits / 8:.4g}e9"
    usual = f"{{latency = {latency:g}, {bandwidth}, start = {start:g}, ramp = {ramp:g}}}"
    return f"""
[[links]]                       # {adapters} adapters of {gigabits:g} Gb/s in each node
name = "{name}"
{bandwidth}
adapters = {adapters}
latency = {latency:g}
{more}
[links.rates]
all_reduce = {usual}
all_gather = {usual}
reduce_scatter = {usual}
all_to_all = {{latency = {latency / 5:g}, {bandwidth}, start = {start + 4 * latency:g}}}
"""


def torus(dims: tuple[int, ...], gigabytes: float) -> str:
    """The level of a torus. Each device has two links of ``gigabytes`` per second each way in every dim, of which a
    collective reaches 90%."""
    size = 1
    for dim in dims:
        size *= dim
    return f"""
[[links]]                       # {" x ".join(map(str, dims))}, two links of {gigabytes:g} GB/s each way in every dim
name = "ici"
size = {size}
torus = [{", ".join(map(str, dims))}]
bandwidth = {1.8 * gigabytes:g}e9
latency = 1e-6
"""


def spine(pod: int, name: str, adapters: int, gigabits: float, oversubscription: float, latency: float) -> str:
    """A pod of ``pod`` devices whose nodes have ``adapters`` each, and above it a stage that carries the traffic of all
    pods ``oversubscription`` times slower."""
    inner = network(name, adapters, gigabits, latency, more=f"size = {pod}")
    # From the spine's point of view, a pod has one adapter per device.
    rate = 0.95 * gigabits / 8
    return (
        inner
        + f"""
[[links]]                       # the stage above pods
name = "{name}-spine"
bandwidth = {rate:.4g}e9
oversubscription = {oversubscription:g}
latency = {2 * latency:g}
"""
    )
