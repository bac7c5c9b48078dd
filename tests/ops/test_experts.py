"""Mixture-of-experts models: traced whatever their implementation, exact, and with experts sharded where that pays."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.ir.graph import Graph
from autopar.ir.placements import shard_dim
from autopar.planner.timings import Timings
from autopar.search.best_plan import best_plan
from autopar.trace import moe_blocks
from autopar.trace.moe_blocks import activation_text, experts_as_operations
from autopar.trace.tracer import trace
from tests.helpers.marks import slow_but
from tests.helpers.planning import make_request
from tests.zoo.check import check_assignments, make_case

hf.logging.set_verbosity_error()

_SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "use_cache": False,
}  # fmt: skip
_MOE: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1,
}  # fmt: skip

FAMILIES: dict[str, tuple[Any, Any]] = {
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig(**_SIZES, num_local_experts=4)),
    "qwen2": (hf.Qwen2MoeForCausalLM, hf.Qwen2MoeConfig(**_SIZES, **_MOE, shared_expert_intermediate_size=16)),
    "qwen3": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**_SIZES, **_MOE, head_dim=12)),
    "olmoe": (hf.OlmoeForCausalLM, hf.OlmoeConfig(**_SIZES, num_experts=5, num_experts_per_tok=2)),
    "deepseek": (hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config(**_SIZES, **_DEEPSEEK)),
    "gpt_oss": (
        hf.GptOssForCausalLM,
        hf.GptOssConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=12),
    ),
}


def make(name: str, implementation: str = "eager", length: int = 5) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    kind, config = FAMILIES[name]
    torch.manual_seed(0)
    model = kind._from_config(config, experts_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():  # Some leave their experts' biases, or a router's, at zero.
            parameter.normal_(std=0.2)
    ids = torch.randint(3, 61, (6, length), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "labels": ids}


def operations(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[str]:
    return [node.op for node in trace(model, (), batch, device="cpu").graph]


QUICK = ("mixtral",)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES])
def test_any_assignment_is_the_eager_model(name: str) -> None:
    model, batch = make(name)
    case = make_case(model, batch)
    found = [node.op for node in case.graph]
    layers = 1 if name == "deepseek" else 2
    assert found.count("autopar.experts.default") == found.count("autopar.experts_backward.default") == layers
    assert Graph.from_text(case.graph.to_text()).nodes == case.graph.nodes, "activations survive the text form"
    check_assignments(case, (2, 2), range(2))


def one_layer(implementation: str = "eager") -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Mixtral's first layer."""
    model, batch = make("mixtral", implementation)
    del model.model.layers[1]  # type: ignore[operator, union-attr]
    return model, batch


@pytest.mark.slow
@pytest.mark.parametrize("implementation", slow_but(["eager"], ["eager", "batched_mm", "grouped_mm"]))
def test_every_implementation_is_traced_alike_and_left_as_it_was(implementation: str) -> None:
    model, batch = one_layer(implementation)
    assert operations(model, batch).count("autopar.experts.default") == 1
    assert model.config._experts_implementation == implementation
    assert set(model.model.layers[0].mlp.experts.__dict__) == set(one_layer()[0].model.layers[0].mlp.experts.__dict__)


def test_blocks_alike_have_one_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is found by tracing it, which took half of the trace of a Mixtral of 24 layers."""
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**_SIZES | {"num_hidden_layers": 5}, num_local_experts=4))
    experts = [layer.mlp.experts for layer in model.model.layers]
    experts[1].act_fn = nn.ReLU()
    experts[2].up_to_here = 2  # Whatever an activation might read.
    experts[3].register_buffer("limit", torch.ones(()))
    found = Mock(side_effect=activation_text)
    monkeypatch.setattr(moe_blocks, "activation_text", found)
    with experts_as_operations(model):
        pass
    assert [call.args[0].__self__ for call in found.call_args_list] == experts[:4]


@pytest.mark.slow
def test_a_block_the_operation_cannot_express_takes_the_sorted_form() -> None:
    model, batch = one_layer()
    model.model.layers[0].mlp.experts.act_fn = nn.PReLU()
    found = operations(model, batch)
    assert "autopar.experts.default" not in found
    assert found.count("transformers.grouped_mm_fallback.default") == 2


def test_activations_that_look_beyond_their_row_are_refused() -> None:
    assert activation_text(lambda x: x - x.mean(1, keepdim=True), 6, torch.float32) is not None
    assert activation_text(lambda x: x - x.mean(0), 6, torch.float32) is None
    assert activation_text(lambda x: x[: x.shape[0] // 2], 6, torch.float32) is None
    assert activation_text(nn.PReLU(), 6, torch.float32) is None


class Heavy(hf.MixtralConfig):
    """Experts that outweigh everything else."""


def heavy(experts: int = 8) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = Heavy(
        **{**_SIZES, "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 512, "num_attention_heads": 8},
        num_local_experts=experts,
    )
    with torch.device("meta"):
        model = hf.MixtralForCausalLM._from_config(config, experts_implementation="eager")
    ids = torch.zeros(64, 128, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [(2,), *(pytest.param(m, marks=pytest.mark.slow) for m in ((4,), (2, 2), (8, 8)))], ids=str
)
def test_heavy_experts_end_sharded(mesh: tuple[int, ...]) -> None:
    model, batch = heavy()
    plan = best_plan(make_request(model, batch, mesh), Timings())
    blocks = {name: place for name, place in plan.parameters.items() if ".experts." in name}
    assert len(blocks) == 4
    for name, place in blocks.items():
        assert any(shard_dim(p) == 0 for p in place.weight), f"{name} rests as {place}"
    kinds = {line.kind for line in plan.collectives()}
    assert {"all_gather", "reduce_scatter"} <= kinds or "all_to_all" in kinds, kinds


class Capacity(nn.Module):
    """A block as GShard has it: tokens of a group are put into slots of each expert by a product, and taken out again;
    what finds no slot is dropped by the model itself."""

    def __init__(self, width: int, hidden: int, experts: int, slots: int) -> None:
        super().__init__()
        self.router, self.slots = nn.Linear(width, experts, bias=False), slots
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.router(x).softmax(-1)
        chosen = F.one_hot(gates.argmax(-1), gates.shape[-1])
        slot = (chosen.cumsum(1) - 1) * chosen
        dispatch = F.one_hot(slot.clamp(max=self.slots), self.slots + 1)[..., :-1] * chosen[..., None]
        dispatch = dispatch.to(x.dtype)
        rows = torch.einsum("gsec,gsh->egch", dispatch, x)
        rows = torch.einsum("egch,ehi->egci", rows, self.up).relu()
        rows = torch.einsum("egci,eih->egch", rows, self.down)
        combine = dispatch * (gates * chosen)[..., None]
        return torch.einsum("gsec,egch->gsh", combine, rows).square().mean()


def test_slots_of_experts_travel_by_all_to_all() -> None:
    with torch.device("meta"):
        model, batch = Capacity(1024, 8192, 8, 32), (torch.zeros(16, 128, 1024),)
    request = make_request(model, batch, (8,), pins={"up": "S(0)", "down": "S(0)"})
    plan = best_plan(request, Timings())
    assert shard_dim(plan.parameters["up"].weight[0]) == 0
    assert "all_to_all" in {line.kind for line in plan.collectives()}


def test_capacity_is_exact() -> None:
    torch.manual_seed(0)
    model, batch = Capacity(10, 12, 4, 3), (torch.randn(4, 7, 10),)
    check_assignments(make_case(model, batch), (2, 2), range(2))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("mixtral", (2, 2)), ("gpt_oss", (4,))])
def test_processes_agree_with_the_eager_model(name: str, mesh: tuple[int, ...]) -> None:
    model, batch = make(name)
    experts = ",".join(["S(0)"] + ["R"] * (len(mesh) - 1))
    pins = {key: experts for key, _ in model.named_parameters() if ".experts." in key}
    report = autopar.verify(model, mesh, batch, options=autopar.Options(pins=pins, zero=0), cluster="dgx-a100-80gb")
    assert report.ok, str(report)
