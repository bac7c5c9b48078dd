"""The part ``features``: what the runtime does on a GPU beside a plain step, on a mesh of one, against torch's own.

Small models, since nothing is timed. ``waits``: whether a step makes the processor wait for the GPU
(``torch.cuda.set_sync_debug_mode``). The other cases compare losses, weights after steps of AdamW, or tokens:
to the bit where the documents promise that, else within :data:`TOLERANCES`.
"""

from __future__ import annotations

import copy
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import checkpoint
from autopar.arguments import split_batch
from autopar.calibration.default_cluster import default_cluster
from autopar.torch_internals.trees import tree_leaves, tree_map
from tests.zoo.models import ZOO

from .setting import Row, Setting

# Of gradients and weights, relative to the largest element. Chosen: as in the part programs.
TOLERANCES = {"fp32": 2e-4, "bf16": 4e-2, "fp16": 1e-2}
STEPS = 3
SGD: Mapping[str, Any] = {"lr": 0.05, "momentum": 0.9}
VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, ROWS = 515, 128, 3, 4, 48, 8
# Models of the zoo whose compiled programs are compared with eager.
COMPILED = ("gpt2", "llama", "resnet", "t5", "mamba", "swin")
ONLY_ON_GPUS = ("waits", "steps fp16")
Batch = Mapping[str, Tensor]


def cases(setting: Setting) -> list[str]:
    names = [name for name in CASES if name not in ONLY_ON_GPUS or setting.kind == "cuda"]
    return [*names, *(f"compiled {name}" for name in (COMPILED[:1] if setting.tiny else COMPILED))]


def run(case: str, setting: Setting) -> list[Row]:
    """One row, or one for each variant of a case."""
    if case.startswith("compiled "):
        return [compiled(case.partition(" ")[2], setting)]
    return [{"case": f"{case} {name}".strip(), **row} for name, row in CASES[case](setting)]


# --- models ---


def small(dropout: float = 0.0) -> nn.Module:
    """A GPT-2 of odd sizes."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=2 * LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def a_batch(setting: Setting, rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator).to(setting.device)
    return {"input_ids": ids, "labels": ids}


def parallel(setting: Setting, model: nn.Module | None = None, **options: Any) -> autopar.ParallelModule:
    mesh = init_device_mesh(setting.kind, (1,))
    given = {"compile": False, "seed": 0, **options}
    return autopar.parallelize(model or small(), mesh, options=autopar.Options(**given), cluster=with_host(setting))


def with_host(setting: Setting) -> autopar.Cluster:
    """The devices as they are priced, with host memory and a disk to offload to."""
    cluster = default_cluster(setting.kind, 1)
    host = {"host_bandwidth": 20e9, "host_memory_bytes": 2**36}
    disk = {"nvme_read_bandwidth": 1e9, "nvme_write_bandwidth": 1e9, "nvme_bytes": 2**36}
    return replace(cluster, device=replace(cluster.device, **host, **disk))


def trained(module: Any, optimizer: torch.optim.Optimizer, batch: Batch, steps: int = STEPS) -> dict[str, Tensor]:
    """Losses, and weights after ``steps``, by name, on the processor."""
    losses = {}
    for index in range(steps):
        optimizer.zero_grad()
        losses[f"loss {index}"] = module.step(**batch).detach().clone()
        optimizer.step()
    return {n: module.full_tensor(v).detach().cpu() for n, v in (*losses.items(), *module.named_parameters())}


def run_autopar(
    setting: Setting, batch: Batch, model: nn.Module | None = None, *, adam: bool = False, **options: Any
) -> dict[str, Tensor]:
    """By SGD, whose steps differ no more than gradients do, or by AdamW where numbers are equal to the bit."""
    module = parallel(setting, model, optimizer="adamw" if adam else "momentum", **options)
    optimizer = module.optimizer(torch.optim.AdamW, lr=1e-3) if adam else module.optimizer(torch.optim.SGD, **SGD)
    return trained(module, optimizer, batch)


def run_eager(
    setting: Setting, batch: Batch, precision: str = "fp32", steps: int = STEPS, *, adam: bool = False
) -> dict[str, Tensor]:
    model = small().to(setting.device)
    weights = model.parameters()
    optimizer = torch.optim.AdamW(weights, lr=1e-3) if adam else torch.optim.SGD(weights, **SGD)
    scaler = torch.amp.GradScaler(setting.kind, enabled=precision == "fp16")
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    losses = {}
    for index in range(steps):
        optimizer.zero_grad()
        with torch.autocast(setting.kind, dtype, enabled=precision != "fp32"):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses[f"loss {index}"] = loss.detach().clone()
    return {n: v.detach().cpu() for n, v in (*losses.items(), *model.named_parameters())}


# --- comparing ---


def compared(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> Row:
    """The largest error relative to the largest element, and where; ``tolerance`` 0: equal to the bit."""
    worst = (0.0, "")
    for name, value in expected.items():
        size = float(value.double().abs().max()) or 1.0
        error = float((found[name].double() - value.double()).abs().max()) / size
        worst = max(worst, (error if error == error else float("inf"), name))
    return {"error_found": worst[0], "allowed": tolerance, "at": worst[1], "compared": len(expected),
            "equal": worst[0] <= tolerance}  # fmt: skip


def losses_of(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without weights: a step of Adam is of the size of the learning rate also where a gradient is rounding."""
    return {name: value for name, value in values.items() if name.startswith("loss ")}


# --- cases ---

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
    pairs = zip(module.named_parameters(), model.parameters(), strict=True)
    found = {n: (module.full_tensor(p.grad).cpu(), q.grad.cpu()) for (n, p), q in pairs}
    yield "", compared({n: f for n, (f, _) in found.items()}, {n: e for n, (_, e) in found.items()}, TOLERANCES["fp32"])


def saved(setting: Setting) -> Found:
    """A checkpoint of a GPU goes on to the bit in another module, and loads into a plain model."""
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
    expected = model.generate(prompts, max_new_tokens=12, do_sample=False, pad_token_id=0, use_cache=True)
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
    """A model whose own dtype is bfloat16, against eager."""
    batch = a_batch(setting)
    model = small().to(setting.device, torch.bfloat16)
    loss = model(**batch).loss
    loss.backward()
    module = parallel(setting, small().to(torch.bfloat16))
    found = {"loss": module.step(**batch).detach().cpu()}
    yield "", compared(found, {"loss": loss.detach().cpu()}, TOLERANCES["bf16"])


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
    for name, options in {
        "fp32": {},
        "bf16": {"precision": "bf16"},
        "bf16 compiled": {"precision": "bf16", "compile": True},
        "dropout": {},
        "dropout recomputed": {"recompute": "full"},
        "microbatches": {"microbatches": 2},
        "offloaded activations": {"offload": "activations"},
    }.items():
        yield name, attempt(lambda name=name, options=options: _waits(setting, batch, name, options))


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
    args, kwargs = tree_map(lambda x: x.to(setting.device) if isinstance(x, Tensor) else x, (args, kwargs))
    own = copy.deepcopy(model).to(setting.device)
    loss = _loss(own(*args, **kwargs))
    loss.backward()
    module = autopar.parallelize(model, init_device_mesh(setting.kind, (1,)), options=autopar.Options(compile=True))
    made = _loss(module(*args, **kwargs))
    made.backward()
    found, expected = {"loss": made.detach().cpu()}, {"loss": loss.detach().cpu()}
    for (key, ours), reference in zip(module.named_parameters(), own.parameters(), strict=True):
        if reference.grad is not None:
            found[key], expected[key] = module.full_tensor(ours.grad).cpu(), reference.grad.cpu()
    row = compared(found, expected, TOLERANCES["fp32"])
    return {"case": f"compiled {name}", **row, "warnings": [str(w) for w in module.plan.warnings]}


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    return next(x for x in tree_leaves(output) if isinstance(x, Tensor) and x.ndim == 0 and x.requires_grad)


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
