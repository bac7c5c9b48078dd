"""torchtitan: the parallelism of its configurations as an :class:`autopar.Layout`.

A model of torchtitan is an ``nn.Module`` as any other once it is built and initialised, and
:func:`autopar.parallelize` takes it. ``benchmarks/torchtitan_loop.py`` trains its Llama so, beside its own loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from autopar.errors import OptionsError
from autopar.layout import Layout

# The schedules of torch.distributed.pipelining that torchtitan names, as named in autopar.schedule.named.
SCHEDULES = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved", "ZBVZeroBubble": "zb-v"}


def layout_of(config: Any, devices: int) -> Layout:
    """The layout of torchtitan's ``Trainer.Config`` on so many ``devices``, for ``Options(layout=)``.

    Weights that FSDP2 shards and gathers anew for backward are ``zero=3``; those that it keeps gathered after forward
    (``fsdp_reshard_after_forward="never"``, and by default with pipeline stages) rest sharded as well, so they are
    ``zero=3`` too. Selective activation checkpointing has no counterpart and is left to the planner, and so is
    everything that the configuration leaves out; the precision is an option of its own (:func:`precision_of`).

    Raises:
        OptionsError: the degrees do not make up ``devices``, weights are sharded within replicas (HSDP), or the
            schedule has no counterpart.
    """
    asked = config.parallelism
    inner = asked.context_parallel_degree * asked.tensor_parallel_degree * asked.pipeline_parallel_degree
    replicas, shards = asked.data_parallel_replicate_degree, asked.data_parallel_shard_degree
    shards = devices // (replicas * inner) if shards == -1 else shards
    if replicas * shards * inner != devices or shards < 1:
        raise OptionsError(
            f"torchtitan's degrees are {replicas} x {shards} (data) x {inner} (context x tensor x pipeline), which is "
            f"{replicas * shards * inner} devices and not {devices}: change data_parallel_shard_degree, or set it to -1"
        )
    if replicas > 1 and shards > 1:
        raise OptionsError(
            f"data_parallel_replicate_degree={replicas} with data_parallel_shard_degree={shards} shards weights within "
            "each replica (HSDP), which a layout cannot say: set one of them to 1, or leave the layout out and give "
            f"the mesh ({replicas}, {shards * inner}), on which the planner decides for each weight"
        )
    fields = {"tensor": asked.tensor_parallel_degree, "pipeline": asked.pipeline_parallel_degree}
    fields |= {"data": replicas * shards, "context": asked.context_parallel_degree}
    return Layout(**fields, zero=3 if shards > 1 else 0, **dict(_further(config)))


def _further(config: Any) -> Iterator[tuple[str, Any]]:
    """The fields beside degrees of dense layers."""
    asked = config.parallelism
    if asked.expert_parallel_degree > 1:
        yield "expert", asked.expert_parallel_degree
    if asked.tensor_parallel_degree > 1:
        yield "sequence_parallel", asked.enable_sequence_parallel
    if asked.pipeline_parallel_degree > 1:
        if asked.pipeline_parallel_schedule not in SCHEDULES:
            raise OptionsError(
                f"pipeline_parallel_schedule={asked.pipeline_parallel_schedule!r} has no counterpart; those with one "
                f"are {', '.join(SCHEDULES)}"
            )
        yield "schedule", SCHEDULES[asked.pipeline_parallel_schedule]
        yield "microbatch", asked.pipeline_parallel_microbatch_size
        if asked.pipeline_parallel_layers_per_stage is not None:
            layers = len(config.model_spec.model.layers)
            stages = math.ceil(layers / asked.pipeline_parallel_layers_per_stage)
            yield "interleave", max(1, stages // asked.pipeline_parallel_degree)
    else:
        yield "microbatch", config.training.local_batch_size
    if type(config.activation_checkpoint).__qualname__.startswith("FullAC"):
        yield "recompute", "full"


def precision_of(config: Any) -> str:
    """The ``Options(precision=)`` of torchtitan's ``training.mixed_precision_param``."""
    return {"bfloat16": "bf16", "float32": "fp32"}[config.training.mixed_precision_param]
