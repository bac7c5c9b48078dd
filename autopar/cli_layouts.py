"""``autopar plan --devices N``: the best layouts of a large model, beside those somebody names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .cli_output import Output
from .cli_target import Batch, load_target
from .errors import OptionsError
from .layout import Layout
from .layout_report import plan_layouts

# What plans by layouts have no use for, by the name of the option.
_OF_MESHES = (
    "zero",
    "recompute",
    "offload",
    "microbatches",
    "stages",
    "schedule",
    "time_limit",
    "gap",
    "seed",
    "optimizer",
    "pin",
)
_FILES = ("output", "html")
# What plans with --mesh have no use for.
OF_LAYOUTS = ("batch", "sequence", "tokens", "compare")
DEFAULT_SEQUENCE = 2048


def plan_by_layouts(arguments: argparse.Namespace, output: Output) -> int:
    """Prints a :class:`autopar.layout_report.LayoutReport`; returns the exit status."""
    useless = [name for name in (*_OF_MESHES, *_FILES) if getattr(arguments, name) not in (None, [], "")]
    useless += ["show"] * (arguments.show != "plan") + ["no-mesh-search"] * (not arguments.mesh_search)
    if useless:
        word = useless[0].replace("_", "-")
        raise OptionsError(
            f"--{word} is for plans with --mesh; with --devices layouts are searched (--compare names one)"
        )
    compare = [Layout.parse(text) for text in arguments.compare]
    model, batch = _load(arguments)
    with output.progress(f"planning {type(model).__name__} on {arguments.devices} devices"):
        report = plan_layouts(
            model,
            batch,
            arguments.cluster or "local",
            devices=arguments.devices,
            global_batch=arguments.batch,
            tokens=arguments.tokens,
            compare={f"given {i}" if len(compare) > 1 else "given": one for i, one in enumerate(compare, 1)},
            precision=arguments.precision or "bf16",
            memory_limit=arguments.memory_limit,
        )
    output.result(report, report.data())
    return 0


def _load(arguments: argparse.Namespace) -> tuple[nn.Module, Batch]:
    if not arguments.target.endswith(".json"):
        return load_target(arguments.target, meta=arguments.meta)
    if arguments.batch is None:
        raise OptionsError("a config.json has no batch: give --batch SAMPLES (and --sequence TOKENS)")
    model = _of_config(Path(arguments.target))
    ids = torch.empty(arguments.batch, arguments.sequence or DEFAULT_SEQUENCE, dtype=torch.long, device="meta")
    return model, {"input_ids": ids, "labels": ids}


def _of_config(path: Path) -> nn.Module:
    """The causal language model of a transformers configuration, on the meta device in bf16."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise OptionsError(f"{path} is read by transformers, which is not installed") from error
    if not path.is_file():
        raise OptionsError(f"there is no file {str(path)!r}")
    try:
        config = AutoConfig.from_pretrained(path, use_cache=False)
        with torch.device("meta"):
            found: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except (OSError, ValueError, KeyError) as error:
        raise OptionsError(f"{str(path)!r} is no configuration of a causal language model: {error}") from error
    model: nn.Module = found
    return model
