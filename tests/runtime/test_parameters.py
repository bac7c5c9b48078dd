"""Parameters as DTensors: placed as told, whole again by torch's own means, and initialised from meta as in
one process."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, PlanMismatchError
from autopar.ir.placements import Placements, is_valid, parse_placement, parse_placements, short, take_local
from autopar.ir.program import TensorSlot
from autopar.runtime import gather_whole, mesh_groups, place_parameters, run_local, torch_placements
from autopar.runtime.state.materialise import Initialiser, materialise
from autopar.runtime.state.parameters import make_dtensor, take_own, torch_can_gather, wrap_parameters

CPU = torch.device("cpu")
OPTIONS = tuple(map(parse_placement, ("R", "S(0)", "S(1)", "S(0/2)", "S(0/3)", "S(1/2)")))


def placements_of(shape: tuple[int, ...], mesh: tuple[int, ...]) -> list[Placements]:
    """Every placement there is."""
    return [p for p in itertools.product(OPTIONS, repeat=len(mesh)) if is_valid(p, shape, mesh)]


@pytest.mark.parametrize("mesh", [(2, 2), (3,), pytest.param((2, 1, 2), marks=pytest.mark.slow)])
def test_whole_again_and_norms(mesh: tuple[int, ...]) -> None:
    def work(rank: int, world: int) -> int:
        warnings.simplefilter("error")
        groups = mesh_groups(init_device_mesh("cpu", mesh))
        parameters, total, checked = [], 0.0, 0
        stride = {1: 1, 2: 3, 3: 17}[len(mesh)]
        for shape in ((24, 4), (12, 8), (7, 5), (3, 2), (1, 3)):
            tensor = torch.arange(1.0, math.prod(shape) + 1).reshape(shape)
            for placements in placements_of(shape, mesh):
                slot = TensorSlot("w", "param", "w", shape, placements)
                made = make_dtensor(take_own(tensor, slot, groups), slot, groups)
                assert torch.equal(gather_whole(made.to_local(), slot, groups), tensor), (
                    shape,
                    short(placements),
                )
                if not torch_can_gather(placements, mesh):
                    continue
                assert made.shape == shape and torch.equal(made.full_tensor(), tensor), (
                    shape,
                    short(placements),
                )
                checked += 1
                # torch takes long over each new placement in a norm, on three axes above all: a sample is
                # enough.
                if checked % stride == 0:
                    parameter = nn.Parameter(make_dtensor(take_own(tensor, slot, groups).clone(), slot, groups))
                    parameter.grad = make_dtensor(take_own(tensor, slot, groups).clone(), slot, groups)
                    parameters.append(parameter)
                    total += float(tensor.double().square().sum())
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        assert isinstance(norm, DTensor)
        torch.testing.assert_close(float(norm.full_tensor()), math.sqrt(total), rtol=1e-5, atol=0.0)
        again = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        assert isinstance(again, DTensor)
        torch.testing.assert_close(float(again.full_tensor()), 1.0, rtol=1e-5, atol=0.0)
        return checked

    assert min(run_local(work, math.prod(mesh), timeout=30)) > 15


def test_strided_shards_count_before_as_torch_meets_them() -> None:
    found = [torch_placements(parse_placements(text), (2, 2)) for text in ("S(0),S(0/6)", "S(0/6),S(0)", "S(0/3),R")]
    assert [[str(p) for p in placements] for placements in found] == [
        ["S(0)", "_S(0, 3)"],
        ["_S(0, 6)", "S(0)"],
        ["_S(0, 3)", "R"],
    ]


class Odd(nn.Module):
    """Initialisations that recording must follow: own functions, one tensor from another, a view, a
    buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(5, 3))
        self.b = nn.Parameter(torch.empty(3, 5))
        self.c = nn.Parameter(torch.empty(4, 4))
        self.register_buffer("mask", torch.empty(4))
        self.inner = nn.Sequential(nn.Linear(3, 7), nn.LayerNorm(7), nn.Embedding(6, 7, padding_idx=2))
        self.attention = nn.MultiheadAttention(8, 2)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            nn.init.trunc_normal_(self.a, std=0.1)
            self.a.data.mul_(2).add_(1)
            nn.init.orthogonal_(self.c)
            self.b.copy_(self.a.t() + 1)
            self.b[0].zero_()
            self.mask.copy_(torch.arange(4.0))


def built() -> Odd:
    with torch.device("meta"):
        return Odd()


def test_meta_values_depend_on_the_seed_alone() -> None:
    first, second, other = built(), built(), built()
    torch.manual_seed(1)
    materialise(first, CPU, 5)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1)), "the caller's random state was moved"
    initialiser = Initialiser(second, CPU, 5)
    backwards = {n: initialiser.value(p, n) for n, p in reversed(list(second.named_parameters()))}
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, backwards[name]), name
    materialise(other, CPU, 6)
    assert not torch.equal(first.a, other.a)
    assert torch.equal(first.b[1:], first.a.t()[1:] + 1) and not first.b[0].any()
    assert first.mask.tolist() == [0, 1, 2, 3] and not first.inner[2].weight[2].any()
    torch.testing.assert_close(first.c.detach() @ first.c.detach().t(), torch.eye(4))
    a = first.a.detach()
    assert 0.9 < float(a.mean()) < 1.1 and 0.1 < float(a.std()) < 0.4
    assert (
        float(first.inner[0].weight.detach().abs().max()) <= 1 / math.sqrt(3)
        and first.inner[1].weight.tolist() == [1] * 7
    )


def test_meta_model_is_the_same_on_a_mesh_as_in_one_process() -> None:
    whole = built()
    materialise(whole, CPU, 11)
    wanted = {name: value.detach() for name, value in [*whole.named_parameters(), *whole.named_buffers()]}

    def work(rank: int, world: int) -> None:
        torch.manual_seed(rank)
        groups = mesh_groups(init_device_mesh("cpu", (2, 2)))
        model = built()
        wrap_parameters(model, groups)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        kept = list(model.parameters())
        slots = {
            name: TensorSlot(
                name,
                "param",
                name,
                tuple(p.shape),
                parse_placements("S(0),S(1)" if p.dim() == 2 else "R,S(0)"),
            )
            for name, p in model.named_parameters()
        }
        place_parameters(model, {name: (slot, groups) for name, slot in slots.items()}, groups, seed=11)
        assert all(a is b for a, b in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True))
        assert all(a is b for a, b in zip(model.parameters(), kept, strict=True))
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor) and torch.equal(parameter.full_tensor(), wanted[name]), name
            assert parameter.to_local().untyped_storage().nbytes() == parameter.to_local().nbytes
        assert torch.equal(model.mask, wanted["mask"])

    run_local(work, 4, timeout=30)


def test_nothing_to_initialise_with() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3))

    with torch.device("meta"):
        model = Bare()
    with pytest.raises(AutoparError, match="scale is on the meta device and nothing initialises it"):
        materialise(model, CPU, 0)


def test_changed_before_filled() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3))

        def reset_parameters(self) -> None:
            self.scale.data.mul_(2)

    with torch.device("meta"):
        model = Half()
    with pytest.raises(AutoparError, match=r"scale is changed by aten\.mul_\.Tensor before anything fills it"):
        materialise(model, CPU, 0)


def test_hugging_face_meta_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=31, n_positions=8)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    materialise(model, CPU, 3)
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert model.lm_head.weight is model.transformer.wte.weight
    block = model.transformer.h[1]
    torch.testing.assert_close(float(model.transformer.wte.weight.detach().std()), 0.02, rtol=0.15, atol=0.0)
    # GPT-2 scales what is added to the residual stream by the square root of the number of additions.
    torch.testing.assert_close(float(block.mlp.c_proj.weight.detach().std()), 0.02 / 2, rtol=0.15, atol=0.0)
    assert block.ln_1.weight.tolist() == [1.0] * 16
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()


def test_wrong_shape_is_named() -> None:
    def work(rank: int, world: int) -> None:
        groups = mesh_groups(init_device_mesh("cpu", (1,)))
        model = nn.Linear(3, 4)
        wrap_parameters(model, groups)
        slot = TensorSlot("w", "param", "weight", (3, 4), parse_placements("R"))
        place_parameters(model, {"weight": (slot, groups)}, groups)

    with pytest.raises(PlanMismatchError, match=r"weight has shape \[4, 3\], but the plan was made for \[3, 4\]"):
        run_local(work, 1, timeout=30)


def test_rank_zero_decides_and_dtypes_survive() -> None:
    def work(rank: int, world: int) -> None:
        groups = mesh_groups(init_device_mesh("cpu", (3,)))
        torch.manual_seed(rank)
        model = nn.Module()
        for index, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64, torch.float16)):
            model.register_parameter(f"p{index}", nn.Parameter(torch.randn(5, 3).to(dtype)))
        model.register_buffer("flags", torch.rand(3) > 0.5)
        model.p1.requires_grad_(False)
        model.p2.tag = "kept"
        wrap_parameters(model, groups)
        slots = {n: TensorSlot(n, "param", n, (5, 3), parse_placements("S(0)")) for n in ("p0", "p1", "p2")}
        place_parameters(model, {name: (slot, groups) for name, slot in slots.items()}, groups)
        torch.manual_seed(0)
        for index, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64, torch.float16)):
            wanted = torch.randn(5, 3).to(dtype)
            found = model.get_parameter(f"p{index}")
            assert isinstance(found, DTensor) and torch.equal(found.full_tensor(), wanted) and found.dtype == dtype
            local = take_local(wanted, parse_placements("S(0)" if index < 3 else "R"), (3,), (rank,))
            assert torch.equal(found.to_local(), local)
        assert torch.equal(model.flags, torch.rand(3) > 0.5)
        assert not model.p1.requires_grad and model.p0.requires_grad and model.p2.tag == "kept"

    run_local(work, 3, timeout=30)
