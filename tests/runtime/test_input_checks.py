"""Ranks that call the model differently, or with other batches, all get an error that says how; none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime import Compiled, ParallelModule, Request
from autopar.runtime.calls.input_checks import Check
from autopar.runtime.inputs.content_hash import WHOLE_BYTES, content_hash
from tests.helpers.marks import slow_rows_but
from tests.helpers.planning import on
from tests.helpers.runtime_tiny import FEATURES, Tiny, compile_tiny

BATCH = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return nn.functional.cross_entropy(self.b(self.a(x).relu()) * scale, y)


def batch(size: int = BATCH, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=source), torch.randint(0, 4, (size,), generator=source)


def message(call: Callable[[], Any]) -> str:
    """The message of the error that the call ends with."""
    with pytest.raises(autopar.InputMismatchError) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize(
    "count, options", slow_rows_but([0], [(3, {}), (2, {"stages": 2, "microbatches": 2})]), ids=["plain", "stages"]
)
def test_every_rank_is_told_how_ranks_differ(count: int, options: dict[str, Any]) -> None:
    """Before there is a program, and once there is one; the model then still trains."""

    def work(rank: int, world: int) -> list[str]:
        model = autopar.parallelize(Net(), (world,), options=autopar.Options(**options))
        last = rank == world - 1
        said = [message(lambda: model.step(*batch(6 if last else BATCH)))]
        said.append(message(lambda: model.step(*batch(seed=rank))))
        loss = model.step(*batch())
        said.append(message(lambda: model.step(*batch(6 if last else BATCH))))
        said.append(message(lambda: model.step(*batch(), scale=float(rank))))

        def evaluate_on_the_first() -> None:
            with torch.no_grad():
                model.eval() if rank == 0 else model.train()
                model(*batch()) if rank == 0 else model.step(*batch())

        said.append(message(evaluate_on_the_first))
        model.train()
        torch.testing.assert_close(model.step(*batch()), loss)
        return said

    everyone = on(count, work)
    assert all(said == everyone[0] for said in everyone)
    shapes, values, later, scale, mode = everyone[0]
    for text in (shapes, later):
        assert f"input x: f32[8, 6] on rank{'s 0, 1' if count == 3 else ' 0'}; f32[6, 6] on rank {count - 1}" in text
        assert "model.from_local" in text
    others = ", ".join(map(str, range(1, count)))
    assert f"input x (f32[8, 6]): rank{'s' if count > 2 else ''} {others} ha" in values and "from_local" in values
    assert "input scale: 0.0 on rank 0; 1.0 on rank 1" in scale
    assert "outputs without gradients on rank 0; the loss and gradients on rank" in mode and "if rank == 0" in mode


def test_values_are_compared_again_at_growing_intervals_always_or_never() -> None:
    def work(rank: int, world: int) -> dict[str, list[int]]:
        mesh = init_device_mesh("cpu", (world, 1))

        def compile(request: Request) -> Compiled:
            return compile_tiny((world, 1), (rank, 0), request)

        seen: dict[str, list[int]] = {"first": [], "always": [], "never": []}
        for when, failed in seen.items():
            model = ParallelModule(Tiny(), mesh, compile, check_inputs=cast(Check, when))
            model.step(torch.zeros(5, FEATURES))
            for call in range(2, 10):
                try:
                    model.step(torch.full((5, FEATURES), float(rank)))
                except autopar.InputMismatchError:
                    failed.append(call)
        return seen

    for seen in on(2, work):
        assert seen == {"first": [2, 4, 8], "always": [2, 3, 4, 5, 6, 7, 8, 9], "never": []}


def test_options_name_what_there_is() -> None:
    with pytest.raises(autopar.OptionsError, match=r"check_inputs='sometimes'.*'first', 'always', 'never'"):
        autopar.Options(check_inputs="sometimes")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int8])
def test_a_hash_sees_each_value_and_not_the_layout(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (5, 7), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert content_hash(tensor) == content_hash(tensor.t().contiguous().t()) == content_hash(tensor[:, :].clone())
    for place in (0, 17, 34):
        other = tensor.clone()
        other.view(-1)[place] = 0 if other.view(-1)[place] else 1
        assert content_hash(other) != content_hash(tensor)
    assert content_hash(tensor[:0]) == content_hash(tensor[:0].clone()) and content_hash(tensor[0, 0]) != bytes(16)


def test_a_hash_of_much_data_sees_any_one_value_and_any_exchange() -> None:
    large = torch.arange(WHOLE_BYTES + 1003, dtype=torch.int32).view(torch.uint8)[: WHOLE_BYTES + 1003].clone()
    wanted = content_hash(large)
    for place in (0, 5001, WHOLE_BYTES // 2 + 13, large.numel() - 1):
        large[place] += 1
        assert content_hash(large) != wanted
        large[place] -= 1
    words = large[:WHOLE_BYTES].view(torch.int64)
    words[5000], words[5001] = words[5001].clone(), words[5000].clone()
    assert content_hash(large) != wanted
    assert content_hash(large[1:]) != wanted
