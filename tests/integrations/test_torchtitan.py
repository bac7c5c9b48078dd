"""torchtitan: its configurations as layouts, and its Llama beside its own loop."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import autopar
from autopar.errors import OptionsError
from autopar.integrations.torchtitan import layout_of, precision_of


class FullAC:
    class Config:
        """Named as torchtitan's."""


def _config(activation_checkpoint: Any = None, **parallelism: Any) -> Any:
    """What ``layout_of`` reads of a ``Trainer.Config``, with the defaults of torchtitan 0.3."""
    defaults = {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": -1,
        "tensor_parallel_degree": 1,
        "enable_sequence_parallel": True,
        "pipeline_parallel_degree": 1,
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_microbatch_size": 1,
        "pipeline_parallel_layers_per_stage": None,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
    }
    return SimpleNamespace(
        parallelism=SimpleNamespace(**{**defaults, **parallelism}),
        training=SimpleNamespace(local_batch_size=8, mixed_precision_param="bfloat16"),
        activation_checkpoint=activation_checkpoint,
        model_spec=SimpleNamespace(model=SimpleNamespace(layers=[None] * 8)),
    )


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (_config(), "data=8 microbatch=8 zero=3"),
        (
            _config(tensor_parallel_degree=2, activation_checkpoint=FullAC.Config()),
            "tensor=2 data=4 microbatch=8 recompute=full sequence_parallel=true zero=3",
        ),
        (_config(data_parallel_replicate_degree=8, data_parallel_shard_degree=1), "data=8 microbatch=8"),
        (
            _config(
                pipeline_parallel_degree=2, pipeline_parallel_schedule="Interleaved1F1B",
                pipeline_parallel_layers_per_stage=2, tensor_parallel_degree=4, enable_sequence_parallel=False,
            ),
            "tensor=4 pipeline=2 microbatch=1 interleave=2 schedule=interleaved",
        ),
        (_config(context_parallel_degree=2, expert_parallel_degree=4), "data=4 context=2 expert=4 microbatch=8 zero=3"),
    ],
)  # fmt: skip
def test_degrees_become_a_layout(config: Any, layout: str) -> None:
    found = layout_of(config, 8)
    assert found == autopar.Layout.parse(layout)
    # A plan can be restricted by every field that is given.
    assert autopar.Options(layout=found).layout is not None
    assert precision_of(config) == "bf16"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (_config(tensor_parallel_degree=3), r"1 x 2 \(data\) x 3 .* is 6 devices and not 8"),
        (_config(data_parallel_replicate_degree=2), r"HSDP.*give the mesh \(2, 4\)"),
        (_config(pipeline_parallel_degree=2, pipeline_parallel_schedule="DualPipeV"), "'DualPipeV' has no counterpart"),
    ],
)
def test_what_a_layout_cannot_say_is_an_error(config: Any, said: str) -> None:
    with pytest.raises(OptionsError, match=said):
        layout_of(config, 8)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
@pytest.mark.timeout(600)
def test_its_llama_trains_as_in_its_own_loop(tmp_path: Path) -> None:
    """The benchmark compares losses step by step, and fails where they differ."""
    from benchmarks.torchtitan_loop import main

    output = tmp_path / "figures.json"
    assert main(["--rounds", "1", "--layouts", "FSDP2", "FSDP2 2 x TP 2", "--output", str(output)]) == 0
    found = json.loads(output.read_text())["layouts"]
    assert set(found) == {"FSDP2", "FSDP2 2 x TP 2"}
    for each in found.values():
        assert each["largest_error"] < 1e-4
        assert each["losses"]["torchtitan"][0] != each["losses"]["torchtitan"][-1]
