"""Kernels as prices assume them, beside those that Inductor would write for the same program."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from autopar.planner.step_graphs import step_graph
from benchmarks.inductor_kernels import counting, predicted
from benchmarks.one_process import MODELS
from tests.helpers.marks import slow_but
from tests.helpers.planning import make_request, on

# Of the bytes that kernels move, and of their number: of those that move at least LEAST bytes, since others are scalars
# and vectors of channels. Batch norms are priced as they are written out: Inductor finds mean and variance in one, and
# centers values inside of the kernels that use them.
USUAL, WITH_BATCH_NORM, LEAST = (0.15, 0.3), (0.2, 0.6), 1 << 15


@pytest.mark.parametrize("name", slow_but(["GPT-2"], ["GPT-2", "Llama", "BERT", "ViT", "ResNet"]))
def test_kernels_are_those_of_inductor(name: str) -> None:
    """One layer of each kind, since equal pieces are compiled once."""

    def work(rank: int, world: int) -> dict[str, Any]:
        model, batch = MODELS[name](1)  # type: ignore[call-arg]
        request = make_request(model, dict(batch), (1,), "local", compile=True)
        own = predicted(step_graph(request.graph, request.loss, request.batch), request.cluster.device)
        options = autopar.Options(compile=True)
        parallel = autopar.parallelize(model, (1,), example_inputs=dict(batch), options=options, cluster="local")
        with counting() as found:
            parallel(**batch).loss.backward()
        return {"own": [each.bytes for each in own], "inductor": [each.bytes for each in found]}

    ((figures),) = on(1, work)
    own, inductor = ([size for size in figures[name] if size >= LEAST] for name in ("own", "inductor"))
    in_bytes, in_number = WITH_BATCH_NORM if name == "ResNet" else USUAL
    assert sum(own) == pytest.approx(sum(inductor), rel=in_bytes), figures
    assert len(own) == pytest.approx(len(inductor), rel=in_number), figures
