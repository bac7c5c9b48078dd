"""Fields of layouts that are none, and the precision a model is priced in."""

from __future__ import annotations

import pytest
import torch

from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.precision import DTYPES, computed_in
from tests.helpers.recipes import layout_of


class Regression(torch.nn.Module):
    """In float32, as modules are when nobody says otherwise, with a buffer and an input that are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512, bias=False) for _ in range(4))
        self.register_buffer("scale", torch.ones(512))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x * self.scale)
        return torch.nn.functional.mse_loss(x, y)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_model_is_priced_in_the_precision_of_the_layout(precision: str) -> None:
    """Whatever dtype it is in: a float32 model under bf16 runs at the rate of bf16, and holds two bytes of a weight."""
    cluster = Cluster.get("dgx-a100-80gb")
    rows = torch.empty(4096, 512, device="meta")
    layout = layout_of(microbatch=4096, precision=precision)  # type: ignore[arg-type]
    converted = (
        computed_in(Regression().to(dtype), (rows.to(dtype), rows.to(dtype)), DTYPES[precision])
        for dtype in (torch.float32, torch.bfloat16)
    )
    single, half = (LayoutModel.of(*each).price(layout, cluster).predicted for each in converted)
    assert single == half
    assert single.weight_bytes == 4 * 512 * 512 * (4 if precision == "fp32" else 2)
    assert 0 < single.mfu < 1


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"zero": True}, "zero=True"),
        ({"zero": 1.0}, "zero=1.0"),
        ({"sequence_parallel": "yes"}, "sequence_parallel='yes'.: neither True nor False"),
        ({"offload": 1}, "offload=1.: neither True nor False"),
        ({"recomputed": ("mlp",), "recompute": "full"}, r"recomputed=\('mlp',\)\): layers are recomputed anyway"),
        ({"eager": (1,)}, "eager=.*not a tuple of words"),
        ({"replicated": "mlp"}, "replicated='mlp'.: not a tuple of words"),
        ({"operands": "half"}, "operands='half'.: must be one of 'shards', 'whole'"),
        ({"capacity": "1"}, "capacity='1'.: not a positive number"),
        ({"capacity": float("inf")}, "capacity=inf"),
        ({"schedule": "zb-v", "pipeline": 1}, "2 chunks of layers take turns on each stage, and pipeline=1 has none"),
        ({"schedule": "interleaved", "pipeline": 2}, "at least 2 chunks on each stage; take interleave=2"),
    ],
)
def test_fields_of_other_kinds_are_refused(named: dict[str, object], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        layout_of(**named)  # type: ignore[arg-type]
