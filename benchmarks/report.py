"""How every benchmark describes its machine and hands over its figures."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


def describe_machine() -> dict[str, object]:
    """What a figure depends on: processor, cores, memory, devices, versions."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "gpus": gpus,
        "threads_per_process": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "ortools": version("ortools"),
        "autopar": version("autopar"),
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def emit(figures: Mapping[str, Any], table: Table, as_json: bool, path: str | None) -> None:
    """Prints ``figures`` as JSON or as ``table``, and writes the JSON to ``path`` if given."""
    document = json.dumps(figures, indent=2) + "\n"
    if path is not None:
        Path(path).write_text(document)
    if as_json:
        sys.stdout.write(document)
    else:
        Console().print(table)


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    return table
