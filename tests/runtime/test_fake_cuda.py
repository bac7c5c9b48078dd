"""Programs of all ranks rehearsed on fake tensors of CUDA: a part of ``benchmarks.rehearse_cuda``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.ir.placements import local_shape
from autopar.ir.program import Program, TensorSlot
from autopar.passes.annotate.annotate import annotate
from autopar.placement.prices import Prices
from autopar.planner.prepare import prepare
from autopar.planner.step_graphs import step_graph
from autopar.precision import Precision
from autopar.runtime.execute.executor import own_constants, runner
from autopar.runtime.execute.in_place import WRITING, writing
from autopar.runtime.execute.torch_operations import resolve_aten
from autopar.runtime.rehearse.fake_device import fake_device
from autopar.runtime.rehearse.rehearsal import ImaginedGroups
from autopar.runtime.state import loss_scale
from autopar.runtime.state.gradient_norm import clip, total_norm
from autopar.runtime.state.optimizer import make_optimizer
from benchmarks.rehearse_cuda import OnProcessor, measure
from benchmarks.zoo import configurations, solved
from tests.zoo.check import programs


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("tied", "bf16"),
        pytest.param("attention_variants", None, marks=pytest.mark.slow),
        pytest.param("attention_variants", "bf16", marks=pytest.mark.slow),
        pytest.param("gpt2", "bf16", marks=pytest.mark.slow),
        pytest.param("gpt2", None, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_of_all_kinds_of_plans_run(name: str, precision: Precision | None) -> None:
    rows = measure(name, precision)
    assert [row["plan"] for row in rows] == ["best", "sharded", "random", "stages"]
    assert [row.get("wrong") for row in rows] == [[], [], [], []]
    assert all(row["peak_bytes"] == row["predicted_bytes"] for row in rows)
    assert sum(row["collectives"] for row in rows) > 100


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        (1, (5, 6)),
        (slice(1, 3), (2, 5, 6)),
        ((..., 2), (4, 5)),
        ((slice(None), None, 0), (4, 1, 6)),
        ((slice(-1, None), ..., slice(0, 4)), (1, 5, 4)),
    ],
    ids=str,
)
def test_indexing_needs_no_device(key: Any, shape: tuple[int, ...]) -> None:
    with fake_device():
        assert torch.empty(4, 5, 6, device="cuda")[key].shape == shape


def test_indexing_by_tensors_needs_no_device() -> None:
    with fake_device():
        rows = torch.empty(4, 5, 6, device="cuda")[torch.empty(3, dtype=torch.int64, device="cuda")]
    assert (rows.shape, rows.device.type) == ((3, 5, 6), "cuda")


def test_unfolding_needs_no_device() -> None:
    with fake_device():
        columns = torch.ops.aten.im2col.default(torch.empty(2, 3, 8, 1, device="cuda"), [3, 1], [1, 1], [1, 0], [1, 1])
        image = torch.ops.aten.col2im.default(columns, [8, 1], [3, 1], [1, 1], [1, 0], [1, 1])
    assert (columns.shape, image.shape, image.device.type) == ((2, 9, 8), (2, 3, 8, 1), "cuda")


def test_reading_a_value_and_mixing_devices_are_errors() -> None:
    with fake_device():
        x = torch.empty(4, device="cuda")
        with pytest.raises(RuntimeError):
            x.sum().item()
        with pytest.raises(RuntimeError, match="device"):
            x + torch.empty(4)


class Regression(nn.Module):
    """A small model with a product, a norm and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.body(x), y)


def _first_program(precision: Precision) -> Program:
    """The program of the first of two ranks, parameters sharded."""
    batch = (torch.randn(8, 16), torch.randn(8, 4))
    base = prepare(Regression(), batch, {}, device="cuda", loss_fn=None, training=True, precision=precision)
    annotated = annotate(step_graph(base.graph, base.loss, base.batch), (2,))
    cluster, options = configurations()["sharded"]
    prices = Prices.of(cluster, (2,), annotated)
    return programs(annotated, solved(annotated, prices, options), prices)[0]


def _empty(slot: TensorSlot, groups: ImaginedGroups) -> torch.Tensor:
    shape = local_shape(slot.shape, slot.placements, groups.shape, groups.coordinate)
    return torch.empty(shape, dtype=slot.dtype, device=groups.device)


def _gradients(program: Program, groups: ImaginedGroups, stored: list[torch.Tensor]) -> list[torch.Tensor]:
    """Refresh, forward and backward."""
    refresh, forward, backward = (runner(section, groups, "a rehearsal") for section in program.sections)
    working = dict(zip((slot.target for slot in program.parameters), refresh(list(stored)), strict=True))
    constants = own_constants(program.placeholders, program.constants, groups)
    known = {"param": working, "constant": constants}
    inputs = [known[s.kind][s.target] if s.kind in known else _empty(s, groups) for s in program.placeholders]
    saved = forward(inputs)[len(program.results) :]
    return backward([*saved, *(_empty(slot, groups) for slot in program.tangents)])


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True, "capturable": True}], ids=str)
def test_a_whole_step_reads_one_value_and_only_to_scale_the_loss(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, backward, loss scaling, clipping and the update: fake tensors refuse to be read, so a step that ends has
    not waited for the GPU, but where the flag of an overflow is read."""
    program = _first_program("fp16")
    read: list[torch.Tensor] = []
    monkeypatch.setattr(loss_scale, "read_flag", lambda flag: bool(read.append(flag)))
    with fake_device(), OnProcessor() as on_processor:
        groups = ImaginedGroups((2,), (0,), "nccl", torch.device("cuda", 0))
        stored = [nn.Parameter(_empty(slot, groups)) for slot in program.parameters]
        optimizer = make_optimizer(torch.optim.AdamW, stored, lr=1e-3, **options)
        scale = loss_scale.LossScale()
        for _ in range(2):
            gradients = _gradients(program, groups, [parameter.detach() for parameter in stored])
            assert scale.settle(gradients, stored, groups)
            for parameter, gradient in zip(stored, gradients, strict=True):
                parameter.grad = gradient
            clip(gradients, total_norm(gradients, groups, 2.0), 1.0)
            optimizer.step()
            scale.consumed()
    assert [(flag.device.type, flag.numel()) for flag in read] == [("cuda", 1)] * 2
    assert on_processor.names == []
    assert {value.device.type for state in optimizer.state.values() for value in state.values()} == {"cuda"}


def test_depthwise_convolutions_need_no_device() -> None:
    """Torch asks the GPU for its properties to choose their kernel."""
    with fake_device():
        x, weight = torch.empty(6, 48, 17, device="cuda"), torch.empty(48, 1, 4, device="cuda")
        out = torch.ops.aten.convolution.default(x, weight, None, [1], [3], [1], False, [0], 48)
        assert (out.shape, out.device.type) == ((6, 48, 20), "cuda")
        mask = [True, True, False]
        gradients = torch.ops.aten.convolution_backward.default(
            out, x, weight, None, [1], [3], [1], False, [0], 48, mask
        )
        assert [g.shape for g in gradients[:2]] == [x.shape, weight.shape]
        with pytest.raises(RuntimeError, match="several devices or dtypes"):
            torch.ops.aten.convolution.default(x, weight.to(torch.bfloat16), None, [1], [3], [1], False, [0], 48)


def test_log_softmax_of_a_transposed_tensor_needs_no_device() -> None:
    with fake_device():
        out = torch.ops.aten._log_softmax.default(torch.empty(6, 5, 37, device="cuda").transpose(1, 2), 1, False)
    assert (out.shape, out.device.type) == ((6, 37, 5), "cuda")


GRADIENTS = sorted(op for op in WRITING if op.endswith("_backward.default"))


@pytest.mark.parametrize("op", GRADIENTS)
def test_gradients_of_activations_are_written_in_place(op: str) -> None:
    run = writing(op, (0,), resolve_aten(op), resolve_aten(WRITING[op]))
    with fake_device():
        gradient, value = torch.empty(2, 3, device="cuda"), torch.empty(2, 3, device="cuda")
        assert run(gradient, value, *((0.0,) if "threshold" in op else ())) is gradient


def test_a_gradient_that_does_not_fit_is_an_error() -> None:
    with fake_device():
        gradient, narrow = torch.empty(2, 3, device="cuda"), torch.empty(1, 3, device="cuda")
        with pytest.raises(RuntimeError, match="does not fit"):
            torch.ops.aten.tanh_backward.grad_input(gradient, gradient, grad_input=narrow)
