"""Random operations without a form of ours: all ranks draw what one device draws, in the same order, whatever the
plan. The state of those with one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.ir.node import Value
from autopar.ir.placements import REPLICATE
from autopar.ir.program import Instruction, Program, Section, TensorSlot, draws_numbers, is_random
from autopar.passes.lower.overlap import overlap
from autopar.runtime.comm.groups import mesh_groups, mesh_of_one
from autopar.runtime.execute.randomness import RandomState, draws, shared_random
from autopar.runtime.launch import run_local
from autopar.runtime.state.parameters import shared_seed
from tests.helpers.models import make


def test_which_operations_are_random() -> None:
    assert is_random("aten.bernoulli.p") and is_random("aten.randn.default")
    assert not any(map(is_random, ("aten.add.Tensor", "collective.wait", "autopar.masked_gather", "aten.nothing.here")))


def test_operations_that_draw_with_a_probability_of_zero_draw_nothing() -> None:
    operands = (Value("q"), Value("k"), Value("v"))
    op = "aten._scaled_dot_product_flash_attention.default"

    def attention(*args: float, **kwargs: float) -> Instruction:
        return Instruction("y", op, (*operands, *args), tuple(kwargs.items()), 2)

    assert is_random(op)
    assert not any(map(draws_numbers, (attention(), attention(0.0), attention(dropout_p=0.0))))
    assert all(map(draws_numbers, (attention(0.1), attention(dropout_p=0.1))))
    assert draws_numbers(Instruction("y", "aten.bernoulli.p", (Value("x"), 0.5)))


def _draws(rank: int, world: int) -> tuple[list[float], list[float]]:
    """A draw within and one after."""
    torch.manual_seed(100 + rank)
    groups = mesh_groups(DeviceMesh("cpu", torch.arange(world)))
    with shared_random(groups):
        inside = torch.rand(2).tolist()
    return inside, torch.rand(2).tolist()


def test_ranks_draw_as_the_first_and_keep_their_own() -> None:
    found = run_local(_draws, 2, timeout=60)
    torch.manual_seed(100)
    first = [torch.rand(2).tolist(), torch.rand(2).tolist()]
    torch.manual_seed(101)
    assert found[0] == tuple(first)
    assert found[1] == (first[0], torch.rand(2).tolist())


def test_one_rank_just_draws() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with shared_random(mesh_groups(mesh_of_one())):
        assert torch.equal(torch.rand(2), expected)


def test_starting_early_never_changes_the_order_of_draws() -> None:
    def draw(name: str) -> Instruction:
        return Instruction(name, "aten.rand.default", ((2,),))

    noisy = Instruction("noisy", "aten.add.Tensor", (Value("x"), Value("b")))
    start = Instruction("start", "collective.all_reduce", (Value("noisy"),), (("axes", (0,)), ("op", "sum")))
    wait = Instruction("wait", "collective.wait", (Value("start"),))
    total = Instruction("total", "aten.add.Tensor", (Value("wait"), Value("a")))
    section = Section("forward", ("x",), (draw("a"), draw("b"), noisy, start, wait, total), (Value("total"),))
    slot = TensorSlot("x", "input", "x", (2,), (REPLICATE,))
    empty = Section("backward", (), (), ())
    program = Program((2,), (0,), (), (slot,), (), (), (), empty, section, empty)
    assert draws(section) and not draws(empty)
    order = [i.name for i in overlap(program).forward.instructions if is_random(i.op)]
    assert order == ["a", "b"]


def test_evaluation_does_not_disturb_training() -> None:
    state, other = RandomState(5), RandomState(5)
    for _ in range(3):
        other.advance(False)
    assert torch.equal(state.advance(True), other.advance(True))
    assert other.advance(False).tolist() == [5, 1, 3, 0]
    assert state.advance(True).tolist() == [5, 0, 1, 0]


SEEDS = (0, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63))


def _shares_seeds(rank: int, world: int) -> list[tuple[int, int]]:
    """Each of ``SEEDS`` as an option, and as the first rank's own."""
    groups = mesh_groups(DeviceMesh("cpu", torch.arange(world)))
    found = []
    for seed in SEEDS:
        torch.manual_seed(seed if rank == 0 else 5)
        found.append((shared_seed(groups, seed), shared_seed(groups)))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_every_seed_that_torch_takes_is_shared(world: int) -> None:
    for found in run_local(_shares_seeds, world, timeout=60):
        assert [option for option, _ in found] == [own for _, own in found]
        assert [own % 2**64 for _, own in found] == [seed % 2**64 for seed in SEEDS]


def test_solvers_take_any_seed() -> None:
    """Theirs has 31 bits; the one of CP-SAT, which makes schedules, refuses more."""
    model, batch = make("stack")
    options = autopar.Options(seed=2**64 - 1, stages=2, microbatches=2, schedule="solved")
    assert autopar.plan(model, (2,), batch, options=options).status == "optimal"


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1, -1])
def test_a_model_draws_from_a_large_seed(seed: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    parallel = autopar.parallelize(model, mesh_of_one(), options=autopar.Options(seed=seed))
    parallel(torch.ones(4, 8)).sum().backward()
    state = parallel.random_state()
    assert state["seed"] % 2**64 == seed % 2**64
    parallel.set_random_state({**state, "seed": seed % 2**64})
    assert parallel.random_state() == state
