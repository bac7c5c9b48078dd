"""Chips of the presets, as the ``[device]`` table of a cluster's TOML. ``docs/cost-model.md`` gives the source of each
number.

Peaks are those of data sheets, without sparsity. ``f32`` is the rate outside matrix units, which torch uses by default.
"""

from __future__ import annotations

V100_16 = """
[device]
name = "V100-SXM2-16GB"
memory_bytes = 16935682048      # 15.77 GiB, what torch reports
memory_bandwidth = 0.79e12      # of 900 GB/s
launch_seconds = 5e-6
view_seconds = 1e-6
matmul_efficiency = 0.95
processors = 80
tile_depth = 384
tile_border = 11
attention_efficiency = 0.6
sustained = 0.92
attention_width = 30
reserve_bytes = 1073741824
reserve_fraction = 0.05
host_bandwidth = 6e9    # two devices share PCIe 3.0 x16
host_memory_bytes = 64424509440   # 60 GiB

[device.peak_flops]
f16 = 125e12
f32 = 15.7e12
f64 = 7.8e12
"""
V100_32 = V100_16.replace("16GB", "32GB").replace("16935682048      # 15.77 GiB", "34079637504      # 31.74 GiB")

A100_80 = """
[device]
name = "A100-SXM4-80GB"
memory_bytes = 84987740160      # 79.15 GiB, what torch reports of 80
memory_bandwidth = 1.75e12      # of 2039 GB/s
launch_seconds = 5e-6
view_seconds = 1e-6
matmul_efficiency = 1.0
processors = 108
tile_depth = 384
tile_border = 10
attention_efficiency = 0.81
sustained = 0.86
attention_width = 30
reserve_bytes = 1610612736      # CUDA context and NCCL buffers
reserve_fraction = 0.05         # fragmentation of the caching allocator
host_bandwidth = 12e9    # two devices share PCIe 4.0 x16
host_memory_bytes = 257698037760   # 240 GiB

[device.peak_flops]
bf16 = 312e12
f16 = 312e12
tf32 = 156e12
f32 = 19.5e12
f64 = 19.5e12
"""
A100_40 = (
    A100_80.replace("80GB", "40GB")
    .replace(
        "84987740160      # 79.15 GiB, what torch reports of 80", "42297786368      # 39.39 GiB, what torch reports"
    )
    .replace("1.75e12      # of 2039", "1.34e12      # of 1555")
    .replace("257698037760   # 240 GiB", "128849018880   # 120 GiB")
)

H100 = """
[device]
name = "H100-SXM5-80GB"
memory_bytes = 84929347584      # 79.10 GiB, what torch reports
memory_bandwidth = 2.9e12       # of 3350 GB/s
launch_seconds = 5.2e-6
host_seconds = 30e-6
view_seconds = 1e-6
matmul_efficiency = 1.0
processors = 132
tile_depth = 384
tile_border = 11.5
attention_efficiency = 0.68
sustained = 0.7
attention_width = 30
masked_attention = 0.28          # 88 TFLOP/s of torch's memory-efficient kernel, heads of 64, measured on an H200
grouped_products = 0.82          # torch's kernel beside cuBLAS, blocks of experts of six sizes, fitted on an H200
reserve_bytes = 2147483648
reserve_fraction = 0.05
host_bandwidth = 24e9    # two devices share PCIe 5.0 x16
host_memory_bytes = 257698037760   # 240 GiB

[device.peak_flops]
f8e4m3 = 1979e12
f8e5m2 = 1979e12
bf16 = 989e12
f16 = 989e12
tf32 = 494.7e12
f32 = 67e12
f64 = 67e12

[device.dtype_efficiency]
tf32 = 0.67
f8e4m3 = 0.95
f8e5m2 = 0.95
"""
H200 = (
    H100.replace("H100-SXM5-80GB", "H200-SXM5-141GB")
    .replace("84929347584      # 79.10 GiB", "150122528768     # 139.81 GiB")
    .replace("2.9e12       # of 3350", "4.15e12      # of 4800")
)

B200 = """
[device]
name = "B200-SXM-180GB"
memory_bytes = 191502483456     # 178.35 GiB, what torch reports
memory_bandwidth = 6.9e12       # of 8000 GB/s
launch_seconds = 5.2e-6
host_seconds = 30e-6
view_seconds = 1e-6
matmul_efficiency = 1.0
processors = 148
tile_depth = 505
tile_border = 25
attention_efficiency = 0.6
sustained = 0.75
attention_width = 30
grouped_products = 0.81          # TransformerEngine beside cuBLAS, 64 experts, on a GB200 (docs/cost-model.md)
reserve_bytes = 2147483648
reserve_fraction = 0.05
host_bandwidth = 24e9    # two devices share PCIe 5.0 x16
host_memory_bytes = 257698037760   # 240 GiB

[device.peak_flops]
f8e4m3 = 4500e12
f8e5m2 = 4500e12
bf16 = 2250e12
f16 = 2250e12
tf32 = 1100e12
f32 = 75e12
f64 = 37e12

[device.dtype_efficiency]
tf32 = 0.92
"""
GB200 = (
    B200.replace("B200-SXM-180GB", "GB200-186GB")
    .replace("191502483456     # 178.35 GiB", "197568495616     # 184 GiB")
    .replace("bf16 = 2250e12\nf16 = 2250e12", "bf16 = 2500e12\nf16 = 2500e12")
    .replace("4500e12", "5000e12")
    .replace("sustained = 0.75", "sustained = 0.72")
    .replace("24e9    # two devices share PCIe 5.0 x16", "200e9   # half of NVLink-C2C, 450 GB/s each way")
    .replace("257698037760   # 240 GiB", "236223201280   # 220 GiB")
)
GB300 = (
    GB200.replace("GB200-186GB", "GB300-288GB")
    .replace("197568495616     # 184 GiB", "298500227072     # 278 GiB")
    .replace("sustained = 0.72", "sustained = 0.85")
)
B300 = (
    GB300.replace("GB300-288GB", "B300-288GB")
    .replace("200e9   # half of NVLink-C2C, 450 GB/s each way", "24e9    # two devices share PCIe 5.0 x16")
    .replace("= 2500e12", "= 2250e12")
    .replace("= 5000e12", "= 4500e12")
)

MI250X = """
[device]
name = "MI250X (one of two dies)"
memory_bytes = 68702699520      # 63.98 GiB
memory_bandwidth = 1.35e12      # of 1638 GB/s
launch_seconds = 8e-6
view_seconds = 1e-6
matmul_efficiency = 0.75
processors = 110
tile_depth = 384
tile_border = 11
attention_efficiency = 0.45
attention_width = 30
reserve_bytes = 1610612736
reserve_fraction = 0.05
host_bandwidth = 25e9    # Infinity Fabric to the processor
host_memory_bytes = 68719476736   # 64 GiB

[device.peak_flops]
bf16 = 191.5e12
f16 = 191.5e12
f32 = 47.9e12
f64 = 47.9e12
"""

MI300X = """
[device]
name = "MI300X"
memory_bytes = 205822885888     # 191.69 GiB
memory_bandwidth = 4.3e12       # of 5300 GB/s
launch_seconds = 8e-6
view_seconds = 1e-6
matmul_efficiency = 0.57
processors = 304
tile_depth = 384
tile_border = 11
attention_efficiency = 0.45
attention_width = 30
reserve_bytes = 2147483648
reserve_fraction = 0.05
host_bandwidth = 48e9    # PCIe 5.0 x16 of its own
host_memory_bytes = 257698037760   # 240 GiB

[device.peak_flops]
f8e4m3 = 2614.9e12
f8e5m2 = 2614.9e12
bf16 = 1307.4e12
f16 = 1307.4e12
tf32 = 653.7e12
f32 = 163.4e12
f64 = 163.4e12
"""

# Two matrix units of 128 x 128 in each of two cores. XLA fuses the operations between products and launches no kernels.
TPU_V4 = """
[device]
name = "TPU v4"
memory_bytes = 33822867456      # 31.5 GiB
memory_bandwidth = 1.05e12      # of 1228 GB/s
launch_seconds = 1e-6
matmul_efficiency = 0.9
matmul_padding = 64
attention_efficiency = 0.5
attention_width = 30
reserve_fraction = 0.05

[device.peak_flops]
bf16 = 275e12
f32 = 68.75e12                  # six bf16 products, as XLA computes it, at the most
"""
TPU_V5P = (
    TPU_V4.replace("TPU v4", "TPU v5p")
    .replace("33822867456      # 31.5 GiB", "102005473280     # 95 GiB")
    .replace("1.05e12      # of 1228", "2.35e12      # of 2765")
    .replace("bf16 = 275e12", "bf16 = 459e12\nf8e4m3 = 459e12")
    .replace("68.75e12", "114.75e12")
)
TPU_V5E = (
    TPU_V4.replace("TPU v4", "TPU v5e")
    .replace("33822867456      # 31.5 GiB", "17179869184      # 16 GiB")
    .replace("1.05e12      # of 1228", "0.7e12       # of 819")
    .replace("bf16 = 275e12", "bf16 = 197e12")
    .replace("68.75e12", "49.25e12")
)
