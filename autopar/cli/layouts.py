"""``autopar plan --devices N``: the best layouts of a large model, compared with those that the user names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import OptionsError
from autopar.layout import Layout
from autopar.layouts.report import plan_layouts

from .arguments import Batch, load_target
from .model_config import load_config, model_of
from .output import Output

# The options that do not apply to plans by layouts.
_OF_MESHES = (
    "microbatches",
    "stages",
    "schedule",
    "time_limit",
    "gap",
    "seed",
    "optimizer",
    "layout",
    "pin",
)
_FILES = ("output", "html")
# The options that do not apply to plans with --mesh.
OF_LAYOUTS = ("batch", "sequence", "tokens", "compare")
# Chosen: the length that GPT-3 was trained with (arXiv 2005.14165, section 2.3).
DEFAULT_SEQUENCE = 2048


def plan_by_layouts(arguments: argparse.Namespace, output: Output) -> int:
    """Prints a :class:`autopar.layouts.report.LayoutReport`; returns the exit status."""
    inapplicable = [name for name in (*_OF_MESHES, *_FILES) if getattr(arguments, name) not in (None, [], "")]
    inapplicable += ["show"] * (arguments.show != "plan") + ["no-mesh-search"] * (not arguments.mesh_search)
    if inapplicable:
        word = inapplicable[0].replace("_", "-")
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
            compare={f"given {i}" if len(compare) > 1 else "given": layout for i, layout in enumerate(compare, 1)},
            precision=arguments.precision or "bf16",
            memory_limit=arguments.memory_limit,
            zero=arguments.zero,
            recompute=arguments.recompute,
            offload=bool(arguments.offload),
        )
    output.result(report, report.data())
    return 0


def _load(arguments: argparse.Namespace) -> tuple[nn.Module, Batch]:
    if not arguments.target.endswith(".json"):
        return load_target(arguments.target, meta=arguments.meta)
    if arguments.batch is None:
        raise OptionsError("a config.json has no batch: give --batch SAMPLES (and --sequence TOKENS)")
    path = Path(arguments.target)
    config = load_config(path)
    model = model_of(config, path)
    sequence = _sequence(config, model, arguments.sequence)
    ids = torch.empty(arguments.batch, sequence, dtype=torch.long, device="meta")
    return model, {"input_ids": ids, "labels": ids}


def _sequence(config: Any, model: nn.Module, requested: int | None) -> int:
    """Tokens of a sample: ``requested``, else :data:`DEFAULT_SEQUENCE`, or fewer if the model has fewer positions.
    Raises :class:`OptionsError` for more than a table of positions has; rotary positions have no limit."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return requested or DEFAULT_SEQUENCE
    if requested is not None and requested > positions and _has_table(model, positions, config.vocab_size):
        raise OptionsError(
            f"--sequence {requested}: the model has {positions} positions (max_position_embeddings); raise them in the "
            "configuration if it is to learn longer sequences"
        )
    return requested or min(DEFAULT_SEQUENCE, positions)


def _has_table(model: nn.Module, positions: int, vocab: int) -> bool:
    """Whether the model has an embedding of so many positions, or of a few more where the first are for padding."""
    sizes = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    return any(positions <= size <= positions + 2 for size in sizes - {vocab})
