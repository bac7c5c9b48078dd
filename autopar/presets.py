"""Descriptions of known hardware, as the TOML a user would write: see :class:`autopar.cluster.Cluster` for
the keys.

Pure data: adding hardware is adding an entry. Where each number comes from: ``docs/cost-model.md``.
"""

from __future__ import annotations

from collections.abc import Mapping

PRESETS: Mapping[str, str] = {
    "dgx-a100-80gb": """
name = "dgx-a100-80gb"
source = "NVIDIA DGX A100 data sheet, with sustained rates as in docs/cost-model.md"
collective_seconds = 10e-6

[device]
name = "A100-SXM4-80GB"
memory_bytes = 84987740160      # 79.15 GiB, what torch reports of 80
memory_bandwidth = 1.75e12      # 2039 GB/s nominal
launch_seconds = 4e-6
view_seconds = 1e-6
matmul_efficiency = 0.8
matmul_padding = 48
reserve_bytes = 1610612736      # CUDA context and NCCL buffers
reserve_fraction = 0.05         # fragmentation of the caching allocator

[device.peak_flops]
bf16 = 312e12
f16 = 312e12
tf32 = 156e12
f32 = 19.5e12
f64 = 19.5e12

[[links]]                       # 12 NVLinks of 25 GB/s each way: 300 nominal
name = "nvswitch"
size = 8
bandwidth = 235e9
latency = 2e-6

[[links]]                       # one 200 Gb/s HDR adapter per GPU: 25 nominal
name = "infiniband"
bandwidth = 23e9
latency = 5e-6
""",
    "local": """
name = "local"
source = "shipped defaults for 4 gloo processes on 2 cores, not measured here: run `autopar calibrate`"
synchronisation_seconds = 4e-3  # of four processes on two cores, one calibration rounded

[device]
name = "cpu"
memory_bytes = 2147483648       # replaced by this machine's memory over the processes
memory_bandwidth = 9e9          # of what no cache holds, each of the four at work
launch_seconds = 4e-6
view_seconds = 2e-6
matmul_padding = 4
reserve_fraction = 0.1

[device.peak_flops]
f32 = 40e9
bf16 = 40e9
f64 = 20e9

[[links]]
name = "gloo"
bandwidth = 0.6e9
latency = 0.25e-3

[links.rates]                   # of autopar's own collectives on gloo, one calibration rounded
all_reduce = {latency = 0.25e-3, bandwidth = 0.55e9, growth = 1.5}
all_gather = {latency = 0.4e-3, bandwidth = 0.9e9, growth = 2}
reduce_scatter = {latency = 0.4e-3, bandwidth = 0.7e9, growth = 1.5}
all_to_all = {latency = 0.45e-3, bandwidth = 1e9, growth = 1.5}

[measurement]
processes = 4
threads = 1
""",
}
