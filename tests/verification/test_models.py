"""Models of every family, on meshes of one, two and three axes, under three plans each: equal to one process, and
priced right."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import autopar
from tests.helpers.models import MODELS, Plain, make
from tests.helpers.planning import CLUSTER, slow_devices

MESHES = [(4,), (2, 2), (2, 1, 2)]
KINDS = ["best", "slow devices", "fully sharded", "tensor parallel"]
# Real models on processes are quick in test_pipelines.py and tests/test_precision.py; in one process, in tests/passes.
QUICK = [
    ("plain", (2, 2), "fully sharded"),
]
REST = [(name, mesh, kind) for name in MODELS for mesh in MESHES for kind in KINDS if (name, mesh, kind) not in QUICK]


def tensor_parallel(model: nn.Module, mesh: tuple[int, ...]) -> autopar.Options:
    """Every matrix whose rows divide is split by rows on the innermost axis; nothing else is sharded at rest."""
    outer = ["R"] * (len(mesh) - 1)
    pins = {
        name: ",".join([*outer, "S(0)" if parameter.shape[0] % mesh[-1] == 0 else "R"])
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2
    }
    # This model multiplies its weights with each other: one that is split must be gathered, which zero=0 excludes.
    return autopar.Options(zero=None if isinstance(model, Plain) else 0, stages=1, pins=pins)


def arguments(kind: str, model: nn.Module, mesh: tuple[int, ...]) -> dict[str, Any]:
    match kind:
        case "slow devices":
            return {"cluster": slow_devices()}
        case "fully sharded":
            return {"cluster": CLUSTER, "options": autopar.Options(zero=3, stages=1)}
        case "tensor parallel":
            return {"cluster": CLUSTER, "options": tensor_parallel(model, mesh)}
    return {"cluster": CLUSTER}


@pytest.mark.parametrize(("name", "mesh", "kind"), [*QUICK, *(pytest.param(*r, marks=pytest.mark.slow) for r in REST)])
def test_equal_to_one_process(name: str, mesh: tuple[int, ...], kind: str) -> None:
    model, batch = make(name)
    report = autopar.verify(model, mesh, batch, timeout=250, **arguments(kind, model, mesh))
    assert report.ok, str(report)
    assert report.unpriced == ()
    assert report.gradient_errors.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
