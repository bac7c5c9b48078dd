"""``autopar plan --devices N``: the plan for so many devices, beside others and layouts that the user names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import OptionsError
from autopar.layout import Layout
from autopar.priced.plan_layouts import plan_layouts

from .arguments import Batch, load_target, options_from
from .model_config import load_config, model_of
from .output import Output
from .plans import check_files, describe, view, write_files

# The options that do not apply to plans with --mesh.
OF_LAYOUTS = ("batch", "sequence", "tokens", "compare")
# Chosen: the length that GPT-3 was trained with (arXiv 2005.14165, section 2.3).
DEFAULT_SEQUENCE = 2048


def plan_by_layouts(arguments: argparse.Namespace, output: Output) -> int:
    """Prints a :class:`autopar.LayoutReport`, or its plan as ``--show`` asks, and writes the plan's files; returns the
    exit status."""
    if not arguments.mesh_search:
        raise OptionsError("--no-mesh-search is for plans with --mesh, whose axes it keeps; --devices has none")
    compare = [Layout.parse(text) for text in arguments.compare]
    options = options_from(arguments)
    check_files(arguments)
    model, batch = _load(arguments)
    with output.progress(f"planning {describe(model)} on {arguments.devices} devices"):
        report = plan_layouts(
            model,
            batch,
            arguments.cluster or "local",
            devices=arguments.devices,
            global_batch=arguments.batch,
            tokens=arguments.tokens,
            compare={f"given {i}" if len(compare) > 1 else "given": layout for i, layout in enumerate(compare, 1)},
            options=options,
        )
    write_files(report.plan, arguments)
    if arguments.show == "plan":
        output.result(report, report.data())
    else:
        output.result(view(report.plan, arguments.show), report.plan)
    return 0


def _load(arguments: argparse.Namespace) -> tuple[nn.Module, Batch]:
    if not arguments.target.endswith(".json"):
        return load_target(arguments.target, meta=arguments.meta)
    path = Path(arguments.target)
    config = load_config(path)
    if arguments.batch is None:
        raise OptionsError("a config.json has no batch: give --batch SAMPLES (and --sequence TOKENS)")
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
