"""Plans and modules for inference: what is counted, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.errors import AutoparError, OptionsError
from autopar.runtime import run_local
from autopar.torch_internals.hugging_face import cache_name
from tests.helpers.generating import make, prompts
from tests.helpers.planning import CLUSTER


def _stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))


def test_nothing_of_training_is_counted() -> None:
    x = torch.randn(8, 16)
    plan = autopar.plan(_stack(), (2,), x, mode="inference", cluster=CLUSTER)
    training = autopar.plan(_stack(), (2,), x, loss_fn=lambda out: out.sum(), cluster=CLUSTER)
    assert plan.predicted.gradient_bytes == plan.predicted.optimizer_bytes == plan.predicted.activation_bytes == 0
    assert {line.phase for line in plan.lines} == {"forward"}
    assert plan.predicted.step_seconds < training.predicted.step_seconds
    assert autopar.Plan.from_json(plan.to_json()) == plan


def test_the_cache_is_counted_and_shards_with_the_heads() -> None:
    model, batch = make("llama"), prompts("llama")
    # Two layers of keys and values for 4 sequences, 2 heads and 16 numbers a head, in float32.
    for length in (64, 512):
        cache = 2 * 2 * 4 * 2 * length * 16 * 4
        options = autopar.Options(cache_length=length)
        whole = autopar.plan(model, (1,), batch, mode="inference", cluster=CLUSTER, options=options)
        assert whole.predicted.input_bytes == pytest.approx(cache, rel=0.01)
        pins = {"*.k_proj": "S(1)", "*.v_proj": "S(1)", "*o_proj.weight": "S(1)"}
        options = autopar.Options(cache_length=length, pins=pins, mesh_search=False)
        sharded = autopar.plan(model, (2,), batch, mode="inference", cluster=CLUSTER, options=options)
        assert sharded.predicted.input_bytes == pytest.approx(cache / 2, rel=0.01)


def test_stages_hold_the_caches_of_all_microbatches() -> None:
    length = 2048
    cache = 2 * 2 * 4 * 2 * length * 16 * 4
    for microbatches in (1, 4):
        options = autopar.Options(cache_length=length, stages=2, microbatches=microbatches)
        plan = autopar.plan(make("llama"), (2,), prompts("llama"), mode="inference", cluster=CLUSTER, options=options)
        # One of two layers.
        assert plan.predicted.input_bytes == pytest.approx(cache / 2, rel=0.01)
        assert plan.predicted.peak_bytes > cache / 2


def test_memory_forces_the_cache_apart() -> None:
    model, batch, length = make("llama"), prompts("llama"), 4096
    cache = 2 * 2 * 4 * 2 * length * 16 * 4
    free = autopar.Options(cache_length=length)
    assert (
        autopar.plan(model, (2,), batch, mode="inference", cluster=CLUSTER, options=free).predicted.peak_bytes > cache
    )
    tight = autopar.Options(cache_length=length, memory_limit=int(0.8 * cache))
    plan = autopar.plan(model, (2,), batch, mode="inference", cluster=CLUSTER, options=tight)
    assert plan.predicted.peak_bytes <= 0.8 * cache


def test_throughput_takes_a_larger_batch_and_stays_within_memory() -> None:
    model, batch = make("llama"), prompts("llama")
    limit = 16 * 2**20
    latency = autopar.Options(cache_length=128, memory_limit=limit)
    throughput = autopar.Options(cache_length=128, memory_limit=limit, objective="throughput")
    one, many = (
        autopar.plan(model, (2,), batch, mode="inference", cluster=CLUSTER, options=each)
        for each in (latency, throughput)
    )
    assert one.batch == 4 and many.batch > 4 and many.predicted.peak_bytes <= limit
    assert many.batch / many.predicted.step_seconds > one.batch / one.predicted.step_seconds


def test_what_is_saved_is_read_by_transformers(tmp_path: Path) -> None:
    plan = {"cluster": CLUSTER, "mode": "inference"}
    run_local(_save, 2, timeout=200, args=(plan, tmp_path))
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(read).__name__ == "LlamaForCausalLM"
    torch.testing.assert_close(read.state_dict(), make("llama").state_dict(), rtol=0, atol=0)


def _save(rank: int, nprocs: int, given: dict[str, Any], folder: Path) -> None:
    pins = {"*o_proj.weight": "S(1)", "*embed_tokens.weight": "S(0)"}
    model = autopar.parallelize(make("llama"), (2,), **given, options=autopar.Options(pins=pins, mesh_search=False))
    model(**prompts("llama"), use_cache=False)
    assert model.get_parameter("model.embed_tokens.weight").to_local().shape[0] < 501
    model.save_pretrained(folder)


def test_one_process_generates_the_same_tokens_in_two_programs() -> None:
    wanted = make("qwen2").generate(**prompts("qwen2"), max_new_tokens=6)  # type: ignore[operator]
    model = autopar.parallelize(make("qwen2"), (1,), mode="inference", options=autopar.Options(cache_length=32))
    assert torch.equal(model.generate(**prompts("qwen2"), max_new_tokens=6), wanted)
    assert torch.equal(model.generate(**prompts("qwen2"), max_new_tokens=6), wanted) and len(model.programs()) == 2
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    ids = prompts("qwen2")["input_ids"][:, 3:]
    with torch.no_grad():
        name = cache_name(make("qwen2"))  # The other one, below, works as well.
        first = model(input_ids=ids, use_cache=True, **{name: cache})
        assert first[name] is cache
        logits = first.logits
        again = model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True).logits
        right = make("qwen2")(torch.cat([ids, ids[:, :1]], 1)).logits
    torch.testing.assert_close(torch.cat([logits, again], 1), right)
    with pytest.raises(AutoparError, match="the cache holds 7 of 32 tokens and gets 30 more"):
        model(input_ids=torch.ones(4, 30, dtype=torch.int64), past_key_values=cache, use_cache=True)
    with pytest.raises(AutoparError, match="beam search"):
        model.generate(**prompts("qwen2"), max_new_tokens=6, num_beams=2)


def test_training_calls_say_what_to_do() -> None:
    model = autopar.parallelize(_stack(), (1,), mode="inference")
    x = torch.randn(4, 16)
    out = model(x)
    torch.testing.assert_close(out.detach(), _stack()(x).detach())
    for call in (
        lambda: out.sum().backward(),
        lambda: model.step(x),
        lambda: model.optimizer(torch.optim.SGD, lr=0.1),
        lambda: model.train(),
        lambda: model.clip_grad_norm_(1.0),
    ):
        with pytest.raises(AutoparError, match="parallelized for inference"):
            call()
    with torch.no_grad():
        assert not model(x).requires_grad


def test_models_that_cannot_generate_are_named() -> None:
    model = autopar.parallelize(_stack(), (1,), mode="inference")
    with pytest.raises(AutoparError, match="Sequential has no generate"):
        model.generate(torch.ones(1, 2))
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=32)
    t5 = autopar.parallelize(transformers.T5ForConditionalGeneration(config), (1,), mode="inference")
    with pytest.raises(AutoparError, match="an encoder and a decoder"):
        t5.generate(torch.ones(1, 2, dtype=torch.int64))


def test_options_of_the_other_mode_are_errors() -> None:
    x = torch.randn(8, 16)
    with pytest.raises(OptionsError, match=r'cache_length=8 is for inference: add mode="inference"'):
        autopar.plan(_stack(), (2,), x, loss_fn=torch.sum, options=autopar.Options(cache_length=8))
    with pytest.raises(OptionsError, match="zero=3"):
        autopar.plan(_stack(), (2,), x, mode="inference", options=autopar.Options(zero=3))
    with pytest.raises(OptionsError, match="loss_fn= is for training"):
        autopar.plan(_stack(), (2,), x, loss_fn=torch.sum, mode="inference")
    with pytest.raises(OptionsError, match="mode='serving'"):
        autopar.plan(_stack(), (2,), x, mode="serving")  # type: ignore[arg-type]
    with pytest.raises(AutoparError, match="Sequential has no generate"):
        autopar.plan(_stack(), (2,), x, mode="inference", options=autopar.Options(cache_length=8))
