"""The part ``features``: what the runtime does on a GPU beside a plain step, on a mesh of one, against torch's own.

Small models, since nothing is timed. ``waits``: whether a step makes the processor wait for the GPU
(``torch.cuda.set_sync_debug_mode``). The other cases compare losses, weights after steps of AdamW, or tokens:
to the bit where the documents promise that, else within :data:`TOLERANCES`.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import checkpoint
from autopar.arguments import split_batch
from autopar.torch_internals.trees import tree_map
from tests.zoo.models import ZOO

from .programs import eager, loss_of
from .setting import Row, Setting
from .small_model import SGD, Batch, a_batch, compared, losses_of, parallel, run_autopar, run_eager, small, trained

# Of gradients and weights, relative to the largest element. Chosen: as in the part programs.
TOLERANCES = {"fp32": 2e-4, "bf16": 4e-2, "fp16": 1e-2}
# Models of the zoo whose compiled programs are compared with eager.
COMPILED = ("gpt2", "resnet", "t5", "mamba")
# What steps may not wait for the GPU: options, and what the name says of the model.
WAITING: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "bf16 compiled": {"precision": "bf16", "compile": True},
    "dropout": {},
    "dropout recomputed": {"recompute": "full"},
    "microbatches": {"microbatches": 2},
    "offloaded activations": {"offload": "activations"},
}
ONLY_ON_GPUS = ("waits", "steps fp16")


def cases(setting: Setting) -> list[str]:
    names = [name for name in CASES if name not in ONLY_ON_GPUS or setting.kind == "cuda"]
    return [*names, *(f"compiled {name}" for name in (COMPILED[:1] if setting.tiny else COMPILED))]


def run(case: str, setting: Setting) -> list[Row]:
    """One row, or one for each variant of a case."""
    if case.startswith("compiled "):
        return [compiled(case.partition(" ")[2], setting)]
    return [{"case": f"{case} {name}".strip(), **row} for name, row in CASES[case](setting)]


Found = Iterator[tuple[str, Row]]


def steps(precision: str, setting: Setting) -> Found:
    """Steps of SGD, uncompiled and compiled, against eager under autocast."""
    batch = a_batch(setting)
    expected = run_eager(setting, batch, precision)
    for compile_ in (False, True):
        found = run_autopar(setting, batch, precision=precision, compile=compile_)
        yield "compiled" * compile_, compared(found, expected, TOLERANCES[precision])


def microbatches(setting: Setting) -> Found:
    """Gradients of microbatches, on one device and uneven, against the whole batch's."""
    batch = a_batch(setting)
    expected = run_eager(setting, batch)
    for count in (2, 4):
        found = run_autopar(setting, batch, microbatches=count)
        yield str(count), compared(found, expected, TOLERANCES["fp32"])


def recomputed(setting: Setting) -> Found:
    """Recomputation under dropout: numbers to the bit, compiled within rounding."""
    batch = a_batch(setting)
    plain = run_autopar(setting, batch, small(0.1), recompute="none")
    for kind in ("selective", "full"):
        yield kind, compared(run_autopar(setting, batch, small(0.1), recompute=kind), plain, 0.0)
    found = run_autopar(setting, batch, small(0.1), recompute="full", compile=True)
    yield "full compiled", compared(found, plain, TOLERANCES["fp32"])
    bf16 = run_autopar(setting, batch, small(0.1), recompute="none", precision="bf16")
    yield "full bf16", compared(run_autopar(setting, batch, small(0.1), recompute="full", precision="bf16"), bf16, 0.0)


def offloaded(setting: Setting) -> Found:
    """State and activations outside of the device: to the bit."""
    batch = a_batch(setting)
    plain = run_autopar(setting, batch, adam=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOPAR_OFFLOAD"] = folder
        for offload in ("activations", "optimizer", "nvme", True):
            given = {"optimizer": "nvme"} if offload == "nvme" else offload
            found = attempt(lambda: compared(run_autopar(setting, batch, adam=True, offload=given), plain, 0.0))  # noqa: B023
            yield str(offload), found


def optimizers(setting: Setting) -> Found:
    """Kinds of torch's AdamW, and clipping, against eager."""
    batch = a_batch(setting)
    expected = losses_of(run_eager(setting, batch, adam=True))
    for kind in ({"fused": True}, {"capturable": True}, {"foreach": True}, {"foreach": False}):
        if setting.kind != "cuda" and "capturable" in kind:
            continue
        module = parallel(setting)
        found = trained(module, module.optimizer(torch.optim.AdamW, lr=1e-3, **kind), batch)
        yield " ".join(f"{name}={value}" for name, value in kind.items()), compared(found, expected, TOLERANCES["fp32"])


def smaller_batch(setting: Setting) -> Found:
    """The last batch of an epoch."""
    module = parallel(setting)
    module.step(**a_batch(setting))
    rows = a_batch(setting, 3)
    module.zero_grad()
    loss = module.step(**rows)
    expected = run_eager(setting, rows, steps=1)["loss 0"]
    yield "", compared({"loss": loss.detach().cpu()}, {"loss": expected}, TOLERANCES["fp32"])


def loop(setting: Setting) -> Found:
    """The other way to train: ``model(**batch).loss.backward()``, with torch's clipping."""
    batch, model = a_batch(setting), small().to(setting.device)
    module = parallel(setting)
    for each in (model, module):
        each(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
    yield "", compared(gradients(module, module), gradients(model, module), TOLERANCES["fp32"])


def gradients(model: nn.Module, module: autopar.ParallelModule) -> dict[str, Tensor]:
    """Whole, on the processor. ``module`` is ``model``, or made from it."""
    found = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return {name: module.full_tensor(gradient).cpu() for name, gradient in found if gradient is not None}


def saved(setting: Setting) -> Found:
    """A checkpoint of a GPU goes on to the bit in another module."""
    batch = a_batch(setting)
    with tempfile.TemporaryDirectory() as folder:
        module = parallel(setting, small(0.1))
        optimizer = module.optimizer(torch.optim.AdamW, lr=1e-3)
        trained(module, optimizer, batch, 1)
        checkpoint.save(folder, module, optimizer, step=1)
        expected = trained(module, optimizer, batch, 2)
        other = parallel(setting, small(0.1))
        again = other.optimizer(torch.optim.AdamW, lr=1e-3)
        checkpoint.load(folder, other, again)
        yield "resumed", compared(trained(other, again, batch, 2), expected, 0.0)


def generated(setting: Setting) -> Found:
    """Greedy tokens, against transformers' own."""
    model = small().eval().to(setting.device)
    prompts = a_batch(setting, 3)["input_ids"][:, :8]
    generate: Any = model.generate
    expected = generate(prompts, max_new_tokens=12, do_sample=False, pad_token_id=0, use_cache=True)
    cached = small().eval()
    mesh = init_device_mesh(setting.kind, (1,))
    served = autopar.parallelize(cached, mesh, mode="inference")
    tokens = served.generate(prompts, max_new_tokens=12, do_sample=False, pad_token_id=0)
    yield "", {"equal": bool(torch.equal(tokens.cpu(), expected.cpu())), "compared": int(tokens.numel())}


def from_a_laptop(setting: Setting) -> Found:
    """A plan made for processors, and one from JSON, run here as they are."""
    batch = a_batch(setting)
    on_processor = {name: value.cpu() for name, value in batch.items()}
    plan = autopar.plan(small(), (1,), on_processor, options=autopar.Options(compile=False))
    plan = autopar.Plan.from_json(plan.to_json())
    mesh = init_device_mesh(setting.kind, (1,))
    module = autopar.parallelize(small(), mesh, plan=plan, options=autopar.Options(seed=0))
    found = trained(module, module.optimizer(torch.optim.SGD, **SGD), batch)
    yield "", compared(found, run_eager(setting, batch), TOLERANCES["fp32"])


def on_meta(setting: Setting) -> Found:
    """A model without memory is initialised on the device, the same under the same seed."""
    made = []
    for _ in range(2):
        with torch.device("meta"):
            model = small()
        made.append(run_autopar(setting, a_batch(setting), model))
    yield "", compared(made[0], made[1], 0.0)


def in_bf16(setting: Setting) -> Found:
    """A model whose own dtype is bfloat16: gradients, against eager."""
    batch, model = a_batch(setting), small().to(setting.device, torch.bfloat16)
    model(**batch).loss.backward()
    module = parallel(setting, small().to(torch.bfloat16))
    module.step(**batch)
    yield "", compared(gradients(module, module), gradients(model, module), TOLERANCES["bf16"])


def timeline(setting: Setting) -> Found:
    """``record_timeline``: actions of a step by the device's clock."""
    module = parallel(setting, microbatches=2)
    module.step(**a_batch(setting))
    with module.record_timeline() as recorded:
        module.step(**a_batch(setting))
    yield "", {"equal": bool(recorded), "said": str(recorded)[:300]}


def waits(setting: Setting) -> Found:
    """A step with clipping and update under ``set_sync_debug_mode("error")``, after three that warm up."""
    batch = a_batch(setting)
    for name, options in WAITING.items():
        yield name, attempt(partial(_waits, setting, batch, name, options))


def _waits(setting: Setting, batch: Batch, name: str, options: Mapping[str, Any]) -> Row:
    module = parallel(setting, small(0.1 if "dropout" in name else 0.0), check_inputs="never", **options)
    optimizer = module.optimizer(torch.optim.AdamW, lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        module.step(**batch)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with _no_waiting():
        step()
    return {"equal": True}


@contextmanager
def _no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def attempt(job: Callable[[], Row]) -> Row:
    """A variant that fails is a row; the others go on."""
    try:
        return job()
    except Exception as error:
        where = "".join(traceback.format_tb(error.__traceback__)[-4:])
        return {"equal": False, "error": f"{type(error).__name__}: {str(error)[:500]}", "where": where}


def compiled(name: str, setting: Setting) -> Row:
    """A model of the zoo by ``compile=True``, against eager on the device: loss and gradients in float32."""
    model, batch = ZOO[name]()
    model = model.train()
    args, kwargs = split_batch(batch)
    expected = eager(model, args, kwargs, "fp32", setting.device)
    args, kwargs = tree_map(lambda x: x.to(setting.device) if isinstance(x, Tensor) else x, (args, kwargs))
    module = autopar.parallelize(model, init_device_mesh(setting.kind, (1,)), options=autopar.Options(compile=True))
    loss = loss_of(module(*args, **kwargs))
    loss.backward()
    found = {"loss": loss.detach().cpu(), **gradients(module, module)}
    row = compared(found, expected, TOLERANCES["fp32"])
    return {"case": f"compiled {name}", **row, "warnings": [str(w) for w in module.plan.warnings]}


CASES: dict[str, Callable[[Setting], Found]] = {
    "waits": waits,
    **{f"steps {precision}": partial(steps, precision) for precision in TOLERANCES},
    "microbatches": microbatches,
    "recomputed": recomputed,
    "offloaded": offloaded,
    "optimizers": optimizers,
    "smaller batch": smaller_batch,
    "loop": loop,
    "saved": saved,
    "generated": generated,
    "from a laptop": from_a_laptop,
    "on meta": on_meta,
    "in bf16": in_bf16,
    "timeline": timeline,
}
