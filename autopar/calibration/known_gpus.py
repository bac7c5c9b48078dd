"""GPUs that a preset describes, by the name that torch has for them."""

from __future__ import annotations

import re
from dataclasses import replace

from autopar.cluster.description import Cluster
from autopar.cluster.presets import PRESETS

# Chips as torch names them; boards on PCIe have no NVLink, so presets do not describe them.
_CHIP = re.compile(r"\b(GB300|GB200|B300|B200|H200|H100|A100|V100|MI300X|MI250X)\b")
_PCIE = re.compile(r"PCIe|NVL$", re.IGNORECASE)
# The largest relative difference in memory between a preset's device and the one at hand.
# Chosen: torch reports a few percent less than the data sheet, and models of one name (40 and 80 GB) differ by more.
ALIKE = 0.1


def preset_of(name: str, memory_bytes: int) -> Cluster | None:
    """The preset of a GPU that torch calls ``name``, None if there is none.

    >>> preset_of("NVIDIA A100-SXM4-80GB", 85 * 10**9).name
    'dgx-a100-80gb'
    >>> preset_of("NVIDIA H100 PCIe", 85 * 10**9) is None
    True
    """
    chip = _CHIP.search(name.replace("_", " "))
    if chip is None or _PCIE.search(name) or "MIG" in name:  # A slice of a GPU has a part of its rates.
        return None
    presets = (Cluster.get(preset) for preset in PRESETS if preset != "local")
    named = (cluster for cluster in presets if re.match(rf"{chip[1]}\b", cluster.device.name))
    match = next((c for c in named if abs(c.device.memory_bytes / memory_bytes - 1) <= ALIKE), None)
    return match and replace(match, source=f"taken because torch calls the GPU {name!r}; {match.source}")
