"""Weights in the format of Hugging Face: from and to its own files, and shard by shard into a meta model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import checkpoint
from autopar.errors import CheckpointError
from autopar.options import Options
from tests.helpers.planning import on

from .training import Tied, assert_equal, batch_of, parallel, run

SHARDED: dict[str, Any] = {"zero": 3, "stages": 1}
STAGED: dict[str, Any] = {"stages": 2, "microbatches": 2, "schedule": "1f1b"}


def gpt2(seed: int, device: str = "cpu") -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    configuration = GPT2Config(
        n_layer=2, n_head=2, n_embd=24, vocab_size=50, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    with torch.device(device):
        return GPT2LMHeadModel(configuration)


IDS = torch.arange(32).reshape(4, 8) % 50


def step(model: Any) -> float:
    return float(model.step(input_ids=IDS, labels=IDS, use_cache=False))


def test_from_and_to_files_of_hugging_face(tmp_path: Path) -> None:
    """``save_pretrained`` -> meta models in shards and in stages -> the same files, which ``from_pretrained`` reads."""
    from transformers import GPT2LMHeadModel

    plain = gpt2(1)
    plain.save_pretrained(tmp_path / "given", max_shard_size="40KB")
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    loss = float(plain(input_ids=IDS, labels=IDS).loss.detach())

    def work(rank: int, world: int) -> list[float]:
        losses = []
        for asked, file_bytes in ((SHARDED, 40_000), (STAGED, 1 << 30)):
            model = autopar.parallelize(gpt2(7, "meta"), (world,), options=Options(**asked), weights=tmp_path / "given")
            losses.append(step(model))
            whole = checkpoint.full_state_dict(model)
            assert list(whole) == (list(expected) if rank == 0 else [])
            for name, value in whole.items():
                assert torch.equal(value, expected[name]), name
            checkpoint.save_safetensors(tmp_path / str(asked["stages"]), model, file_bytes=file_bytes)
        return losses

    for losses in on(2, work):
        torch.testing.assert_close(losses, [loss, loss], rtol=1e-5, atol=1e-5)
    for folder in ("1", "2"):
        again = GPT2LMHeadModel.from_pretrained(tmp_path / folder)
        assert_equal(again.state_dict(), expected)
    given, written = (json.loads((tmp_path / f / "model.safetensors.index.json").read_text()) for f in ("given", "1"))
    assert given["weight_map"].keys() == written["weight_map"].keys(), "tied weights are left out alike"
    assert given["metadata"]["total_size"] == written["metadata"]["total_size"]
    assert sorted(os.listdir(tmp_path / "2")) == ["config.json", "generation_config.json", "model.safetensors"]


class Normed(nn.Module):
    """A buffer that ``reset_parameters`` fills, and one that no state has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("table", torch.ones(4), persistent=False)

    def reset_parameters(self) -> None:
        self.table.fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.linear(x)) * self.table).square().mean()


@pytest.mark.slow
def test_what_is_loaded_into_a_meta_model_is_not_initialised_again() -> None:
    """Tied weights under both names; tables that no state has are initialised."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=50, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    plain = LlamaForCausalLM(config)
    state = plain.state_dict()
    assert "lm_head.weight" in state
    with torch.device("meta"):
        model = autopar.parallelize(LlamaForCausalLM(config), (1,))
        other = autopar.parallelize(Normed(), (1,))
    model.load_state_dict(state)
    loss = model.step(input_ids=IDS, labels=IDS)
    torch.testing.assert_close(loss, plain(input_ids=IDS, labels=IDS).loss.detach(), rtol=1e-5, atol=1e-6)
    normed = Normed()
    normed.norm.running_mean.fill_(3.0)
    other.load_state_dict(normed.state_dict())
    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(other.eval()(x), normed.eval()(x))


@pytest.mark.slow
def test_a_meta_model_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Weights and optimizer state are read when the first batch has brought the plan; buffers, too."""

    def work(rank: int, world: int) -> None:
        made = parallel((world,), **SHARDED)
        made.steps(range(3))
        checkpoint.save(tmp_path, made.model, made.optimizer, step=3)
        wanted = made.whole()
        after = made.steps(range(3, 5))
        with torch.device("meta"):
            empty = Tied()
        again = run(autopar.parallelize(empty, (world,), options=Options(seed=3, **SHARDED)))
        checkpoint.load(tmp_path, again.model, again.optimizer)
        again.model.prepare((batch_of(0),), {}, "loss")
        found = again.whole()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
        assert again.steps(range(3, 5)) == after
        with torch.device("meta"):
            empty = Tied()
        weights = autopar.parallelize(empty, (world,), (batch_of(0),), options=Options(**STAGED), weights=tmp_path)
        gathered = checkpoint.full_state_dict(weights)
        for name, value in gathered.items():
            assert torch.equal(value, wanted[name]), name
        assert bool(gathered) == (rank == 0)

    on(2, work)


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match="is not a folder"):
        checkpoint.load_weights(tmp_path / "nowhere", model)
    with pytest.raises(CheckpointError, match="has no safetensors files"):
        checkpoint.load_weights(tmp_path, model)
    save_file({"weight": torch.ones(2, 3), "other": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no bias, which the model has; the model has no other"):
        checkpoint.load_weights(tmp_path, model)
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    checkpoint.load_weights(tmp_path, model)
    assert float(model.weight.detach().sum()) == 6.0
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-4])
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        checkpoint.load_weights(tmp_path, model)


def peak_bytes() -> int:
    """The most memory that this process has had since :func:`forget_peak`, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


class Wide(nn.Module):
    """256 MiB in four layers of 64 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean()


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux, to measure a peak")
def test_no_rank_has_more_than_its_shards_and_a_block(tmp_path: Path) -> None:
    """A meta model of 256 MiB on four ranks: 64 MiB each, and a block of 64 MiB while reading; exporting needs a
    few blocks of 4 MiB beside the shards."""
    mib = 2**20
    torch.manual_seed(0)
    whole = Wide()
    checkpoint.save_safetensors(tmp_path / "whole", whole, file_bytes=100 * mib)
    expected = [float(layer.weight.detach().double().sum()) for layer in whole.layers]

    def work(rank: int, world: int) -> tuple[float, float, list[float]]:
        with torch.device("meta"):
            empty = Wide()
        model = autopar.parallelize(empty, (world,), options=Options(**SHARDED), weights=tmp_path / "whole")
        torch.ones(64, 4096).sum()
        before = forget_peak()
        model.prepare((torch.ones(8, 4096),), {}, "loss")
        read, before = peak_bytes() - before, forget_peak()
        checkpoint.save_safetensors(tmp_path / "again", model)
        written = peak_bytes() - before
        sums = [float(model.full_tensor(p).double().sum()) for p in model.parameters()]
        return read / mib, written / mib, sums

    for read, written, sums in on(4, work, timeout=250.0):
        assert sums == pytest.approx(expected)
        assert read < 64 + 64 + 60, "its shards, a block, and what tracing and planning need"
        assert written < 60, (read, written)
