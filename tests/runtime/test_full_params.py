"""The original's methods on a parallel model: whole parameters for inference and saving, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError
from autopar.runtime import ParallelModule, run_local
from tests.helpers.runtime_tiny import FEATURES, Tiny
from tests.runtime.test_parallel_module import check_gradients, on_mesh, whole


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_whole_parameters_inside_and_distributed_ones_afterwards(shape: tuple[int, int]) -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        for placed in (False, True):
            if placed:
                model.step(batch), reference(batch)["loss"].backward()
            with model.full_params() as original:
                assert original is model.module
                parameters = dict(original.named_parameters())
                assert not any(isinstance(p, DTensor) for p in parameters.values())
                torch.testing.assert_close(parameters, dict(reference.named_parameters()))
                torch.testing.assert_close(model(batch), reference(batch))
                assert original.head.weight is original.up.weight
                with torch.no_grad():
                    original.up.weight.zero_()  # Lost.
                with model.full_params():
                    assert not isinstance(original.up.weight, DTensor)
            if placed:
                assert bool(whole(model.get_parameter("up.weight").detach()).count_nonzero())
            with pytest.raises(KeyError), model.full_params():
                raise KeyError
        check_gradients(model, reference)
        model.step(batch), reference(batch)["loss"].backward()
        check_gradients(model, reference)

    on_mesh(shape, work)


def test_the_first_ranks_changes_are_written_back_if_asked() -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        def draw(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight)

        for placed in (False, True):
            if placed:
                model.step(batch), model.zero_grad()
            with model.full_params(writeback=True, rank0_only=placed) as original, torch.no_grad():
                for parameter in original.parameters():
                    assert parameter.is_meta == (placed and dist.get_rank() > 0)
                    parameter.fill_(1.0 if dist.get_rank() == 0 else float("nan"))
            assert all(bool((whole(p.detach()) == 1).all()) for p in model.parameters())
        torch.manual_seed(dist.get_rank())
        model.apply(draw)
        torch.manual_seed(0)
        reference.apply(draw)
        torch.testing.assert_close(whole(model.get_parameter("up.weight").detach()), reference.up.weight.detach())

    on_mesh((2, 2), work)


class Written(Tiny):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)

    def generate(self, x: torch.Tensor, count: int = 1) -> torch.Tensor:
        for _ in range(count):
            x = self.down(self.encode(x)).tanh()
        return x

    def save_pretrained(self, folder: Path) -> Path:
        if not folder.exists():
            raise FileNotFoundError(folder)
        assert dist.get_rank() == 0
        torch.save(self.state_dict(), folder / "weights.pt")
        return folder

    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


@pytest.mark.parametrize(
    "options", [autopar.Options(zero=3), autopar.Options(stages=2, microbatches=2)], ids=["z", "s"]
)
def test_methods_of_the_original(tmp_path: Path, options: autopar.Options) -> None:
    def work(rank: int, world: int) -> None:
        torch.manual_seed(0)
        plain, reference = Written(), Written()
        reference.load_state_dict(plain.state_dict())
        batch = torch.randn(4, FEATURES)
        model = autopar.parallelize(plain, (2,), options=options)
        for turn in range(2):
            torch.testing.assert_close(model.generate(batch, count=2), reference.generate(batch, count=2))
            assert model.save_pretrained(tmp_path) == (None if rank else tmp_path)
            reference.load_state_dict(torch.load(tmp_path / "weights.pt"))
            if turn == 0:
                model.step(batch)
        assert model.size() == reference.size() and model.config == {"name": "tiny"}
        with pytest.raises(AutoparError, match=r"with model.full_params\(\): model.module.encode"):
            model.encode(batch)
        with pytest.raises(FileNotFoundError if rank == 0 else AutoparError):
            model.save_pretrained(tmp_path / "missing")

    run_local(work, 2, timeout=120)


def test_what_is_already_so_is_accepted_and_what_cannot_be_is_refused() -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        model.step(batch)
        assert model.to("cpu") is model and model.float() is model and model.cpu() is model
        assert model.to(device="cpu", dtype=torch.float32) is model

        def step_inside() -> None:
            with model.full_params():
                model.step(batch)

        def backward_inside() -> None:
            with model.full_params():
                model(batch)["loss"].backward()

        refused: list[tuple[Callable[[], Any], str]] = [
            (model.half, "Convert the model before"),
            (lambda: model.to(torch.bfloat16), r"Options\(precision='bf16'\)"),
            (lambda: model.to("meta"), "torch.float32 on meta"),
            (model.share_memory, "refused"),
            (lambda: model.to_empty(device="cpu"), "drop the values"),
            (lambda: pickle.dumps(model), "Save its state"),
            (step_inside, "inside full_params"),
            (backward_inside, r"backward\(\) inside full_params"),
            (lambda: ParallelModule(model, mesh, model._compile), "parallel already"),
            (lambda: ParallelModule(model.module, mesh, model._compile), "DTensors already.*new instance"),
            (lambda: autopar.parallelize(nn.Sequential(model.module), mesh), "DTensors already"),
        ]
        for call, message in refused:
            with pytest.raises(AutoparError, match=message):
                call()
        model.step(batch)

    on_mesh((1, 1), work)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_compile_leaves_a_parallel_model_as_it_is() -> None:
    model = autopar.parallelize(nn.Sequential(nn.Linear(6, 4), nn.Tanh()), 1)
    batch = torch.randn(4, 6)
    compiled = torch.compile(model)
    wanted = model(batch)
    found = compiled(batch)
    torch.testing.assert_close(found, wanted)
    found.sum().backward()
    assert model.get_parameter("0.weight").grad is not None


class Remembers:
    """What no graph returns: an object of its own."""


class WithCache(nn.Linear):
    def forward(self, x: torch.Tensor, use_cache: bool = True) -> dict[str, Any]:
        y = super().forward(x)
        return {"loss": y.mean(), "y": y, "past_key_values": Remembers() if use_cache else None, "none": None}


def test_an_output_that_no_compiled_call_returns_is_named_once_and_not_in_training() -> None:
    model, batch = autopar.parallelize(WithCache(6, 4), 1), torch.randn(4, 6)
    model.step(batch)
    model(batch)["loss"].backward()  # Warnings are errors here: ordinary training has none.
    model.eval()
    assert model(batch, use_cache=False)["past_key_values"] is None
    with pytest.warns(UserWarning, match=r"returns past_key_values \(Remembers\).*use_cache=False") as found:
        for size in (4, 3):
            assert model(torch.randn(size, 6))["past_key_values"] is None
    assert len(found) == 1 and "none" not in str(found[0].message)
    with model.full_params():
        assert isinstance(model(batch)["past_key_values"], Remembers)
    kept = autopar.parallelize(WithCache(6, 4).eval(), 1)
    with torch.no_grad(), pytest.warns(UserWarning, match="past_key_values"):
        kept(batch)
