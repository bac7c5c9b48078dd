"""Descriptions of known hardware, as the TOML that a user would write. :class:`autopar.cluster.description.Cluster`
describes the keys.

This is pure data: to add hardware, add an entry. ``docs/cost-model.md`` gives the source of each number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from . import preset_devices as device
from . import preset_links as link

_NCCL = 'algorithms = ["ring", "tree"]'
_NVLS = 'algorithms = ["ring", "tree", "nvls"]'
_XLA = 'algorithms = ["ring"]'


def _preset(name: str, source: str, library: str, *tables: str) -> tuple[str, str]:
    text = f'name = "{name}"\nsource = "{source}; docs/cost-model.md"\noverlaps = true\n{library}\n'
    return name, text + "".join(tables)


def _tpu(name: str, chip: str, dims: tuple[int, ...], gigabytes: float) -> tuple[str, str]:
    slices = link.network("dcn", math.prod(dims) // 4, 200, 20e-6)
    source = "Google Cloud TPU documentation, efficiencies estimated"
    return _preset(name, source, _XLA, chip, link.torus(dims, gigabytes), slices)


_V100 = "V100 data sheet, efficiencies estimated"
_A100 = "A100 data sheet, links fitted to nccl-tests of 8 GPUs, products like the H100's"
_H100 = "H100 data sheet, links and products fitted to XLA's tables and all_reduce_bench"
_H200 = "H200 data sheet, links and products as fitted of the H100"
_B200 = "B200 data sheet, links and products fitted to XLA's tables and all_reduce_bench"
_GB200 = "GB200 NVL72 data sheet, links fitted to XLA's tables, products like the B200's"
_MI250X = "MI250X data sheet, links fitted to nnScaler's profile, the rest estimated"
_MI300X = "MI300X data sheet, links fitted to XLA's tables, products to one measurement"
_INFINIBAND = {gigabits: link.network("infiniband", 8, gigabits) for gigabits in (200, 400, 800)}
_RACK = {gigabits: link.network("infiniband", 72, gigabits) for gigabits in (400, 800)}
_EFA = {
    "p4": link.network("efa", 4, 100, 40e-6, 200e-6, 15e-6),
    "p5": link.network("efa", 32, 100, 40e-6, 200e-6, 15e-6),
    "p6": link.network("efa", 8, 400, 40e-6, 200e-6, 15e-6),
}
_CLOS = link.spine(3072, "roce", 8, 400, 7, 6e-6)
_AWS = "AWS's instance types"

_KNOWN = (
    _preset("dgx-v100", f"NVIDIA {_V100}", _NCCL, device.V100_32, link.NVLINK_V100, link.network("infiniband", 4, 100)),
    _preset(
        "p3.16xlarge", f"{_AWS}; {_V100}", _NCCL, device.V100_16, link.NVLINK_V100,
        link.network("ethernet", 1, 25, 25e-6),
    ),
    _preset("dgx-a100-40gb", f"NVIDIA {_A100}", _NCCL, device.A100_40, link.NVSWITCH_A100, _INFINIBAND[200]),
    _preset("dgx-a100-80gb", f"NVIDIA {_A100}", _NCCL, device.A100_80, link.NVSWITCH_A100, _INFINIBAND[200]),
    _preset("p4d.24xlarge", f"{_AWS}; {_A100}", _NCCL, device.A100_40, link.NVSWITCH_A100, _EFA["p4"]),
    _preset("p4de.24xlarge", f"{_AWS}; {_A100}", _NCCL, device.A100_80, link.NVSWITCH_A100, _EFA["p4"]),
    _preset(
        "jean-zay-a100", f"IDRIS's description of Jean Zay; {_A100}", _NCCL, device.A100_80, link.NVSWITCH_A100,
        link.network("omni-path", 4, 100),
    ),
    _preset("dgx-h100", f"NVIDIA {_H100}", _NVLS, device.H100, link.NVSWITCH_H100, _INFINIBAND[400]),
    _preset("p5.48xlarge", f"{_AWS}; {_H100}", _NVLS, device.H100, link.NVSWITCH_H100, _EFA["p5"]),
    _preset(
        "h100-clos-24k", f"Llama Team 2024, section 3.3.1; {_H100}", _NVLS, device.H100, link.NVSWITCH_H100, _CLOS
    ),
    _preset("dgx-h200", f"NVIDIA {_H200}", _NVLS, device.H200, link.NVSWITCH_H100, _INFINIBAND[400]),
    _preset("dgx-b200", f"NVIDIA {_B200}", _NVLS, device.B200, link.NVSWITCH_B200, _INFINIBAND[400]),
    _preset("p6-b200.48xlarge", f"{_AWS}; {_B200}", _NVLS, device.B200, link.NVSWITCH_B200, _EFA["p6"]),
    _preset("dgx-b300", f"NVIDIA {_B200}", _NVLS, device.B300, link.NVSWITCH_B200, _INFINIBAND[800]),
    _preset("gb200-nvl72", f"NVIDIA {_GB200}", _NVLS, device.GB200, link.NVSWITCH_GB200, _RACK[400]),
    _preset("gb300-nvl72", f"NVIDIA {_GB200}", _NVLS, device.GB300, link.NVSWITCH_GB200, _RACK[800]),
    _preset("mi250x", f"AMD {_MI250X}", _NCCL, device.MI250X, link.XGMI_MI250X, link.network("slingshot", 4, 200)),
    _preset("mi300x", f"AMD {_MI300X}", _NCCL, device.MI300X, link.XGMI_MI300X, _INFINIBAND[400]),
    _tpu("tpu-v4", device.TPU_V4, (16, 16, 16), 50),
    _tpu("tpu-v5e", device.TPU_V5E, (16, 16), 50),
    _tpu("tpu-v5p", device.TPU_V5P, (16, 20, 28), 100),
)  # fmt: skip

_LOCAL = """
name = "local"
source = "shipped defaults for 4 gloo processes on 2 cores, not measured here: run `autopar calibrate`"
synchronisation_seconds = 4e-3  # of four processes on two cores, one calibration rounded
sharing = 4                     # processes on the cores below; the rates are those with all at work
cores = 2
backend = "gloo"

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
"""

PRESETS: Mapping[str, str] = {**dict(_KNOWN), "local": _LOCAL}
