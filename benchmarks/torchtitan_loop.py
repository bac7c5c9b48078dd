"""torchtitan's Llama 3 in torchtitan's own loop, and made parallel by autopar under the same layout, in one run.

    python -m benchmarks.torchtitan_loop [--layouts FSDP2 TP] [--rounds 8] [--json] [--output FILE]

Four gloo processes of this machine run ``Trainer.train_step`` of torchtitan (FSDP2, tensor parallelism), and in turn
the same step by ``autopar.parallelize``: same model, first weights, batches, AdamW, schedule of rates and clipping.
Losses are compared step by step; the seconds are medians of rounds that alternate. torchtitan is written for
accelerators, and its trainer asks the device for things that ``torch.cpu`` lacks, which :class:`_Processor` answers.

torchtitan is no dependency: ``pip install torchtitan==0.3.0`` (it needs triton, too).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import autopar
from autopar.integrations.torchtitan import layout_of, precision_of

from .local_ranks import run_as_ranks
from .report import describe_machine, emit, make_table
from .token_batches import LENGTH, ROWS, VOCABULARY, batch_of

PROCESSES, WARMUP = 4, 3
# Relative, of losses. Chosen: sums in another order, over the steps of a run.
TOLERANCE = 1e-4
# By name, the fields of torchtitan's ParallelismConfig.
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "FSDP2": {},
    "FSDP2 2 x TP 2": {"tensor_parallel_degree": 2},
    "TP": {"tensor_parallel_degree": 4},
    "replicas": {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1},
}
# torchtitan's default ("spmd_types") needs a newer torch than 2.13: FSDP2 refuses its parameters.
BACKEND = "partial_dtensor"
Step = Callable[[], float]


class _Processor:
    """``torch.cpu`` with what torchtitan asks a device for; memory is not measured."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        return "processor"

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=1 << 30, name="processor")

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Nothing is measured."""

    def empty_cache(self) -> None:
        """Nothing is kept."""


def load_torchtitan() -> None:
    """Imports torchtitan as on a machine whose device is the processor; it looks once, when it is imported."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", _Processor()


def configured(fields: Mapping[str, Any]) -> Any:
    """torchtitan's configuration of its debug model (6 layers, width 256), with attention that runs on processors."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    from .torchtitan_data import NoTokenizer, Ranks

    spec = model_registry("debugmodel", attn_backend="varlen")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    parallelism = ParallelismConfig(spmd_backend=BACKEND, **fields)
    data = PROCESSES // (parallelism.tensor_parallel_degree * parallelism.pipeline_parallel_degree)
    return Trainer.Config(
        model_spec=spec,
        parallelism=parallelism,
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        tokenizer=NoTokenizer.Config(),
        dataloader=Ranks.Config(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=ROWS // data, seq_len=LENGTH, steps=1000, disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
        dump_folder=tempfile.gettempdir(),
    )  # fmt: skip


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole values of everything in the ``state_dict``. Collective."""
    state = model.state_dict()
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for name, value in state.items()
    }


def titan_step(trainer: Any) -> Step:
    """A step of torchtitan's loop; returns the global loss, which it logs."""
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):  # gloo cannot multiply within a reduction, by 1 either.
            module.set_force_sum_reduction_for_comms(True)
    logged: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *rest, **further: logged.append(loss)
    trainer.metrics_processor.should_log = lambda step: True
    batches = trainer.batch_generator(trainer.dataloader)

    def step() -> float:
        trainer.step += 1
        trainer.train_step(batches)
        return logged[-1]

    return step


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """torchtitan's loss: the sum of the tokens' losses over their number."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def own_step(config: Any, state: Mapping[str, torch.Tensor], options: autopar.Options) -> Step:
    """The same step of the same model by autopar, from the weights ``state``."""
    model = config.model_spec.model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.load_state_dict(state)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    parallel = autopar.parallelize(model, mesh, options=options, loss_fn=mean_loss)
    rates = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    batches = map(batch_of, iter(range(10**9)))
    optimizer = scheduler = None

    def step() -> float:
        nonlocal optimizer, scheduler
        inputs, labels = next(batches)
        loss = parallel.step(inputs, targets=labels)
        if optimizer is None:  # Once the first step has placed the parameters.
            optimizer = parallel.optimizer(torch.optim.AdamW, **rates)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _warmup)
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def _warmup(step: int) -> float:
    """torchtitan's schedule of 2 warming steps of 1000, then linear to nothing."""
    if step < 2:
        return (step + 1) / 2
    return 1.0 - (step + 1 - 2) / 999


def _seconds(step: Step) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def figures_of(name: str, rounds: int) -> dict[str, Any]:
    """Losses and medians of one layout: torchtitan's loop, autopar under its layout, and autopar's own choice."""
    from torchtitan.trainer import Trainer

    config = configured(LAYOUTS[name])
    trainer = Trainer(config)
    state = whole(trainer.model_parts[0])
    layout = layout_of(config, PROCESSES)
    same = autopar.Options(layout=layout, precision=precision_of(config))  # type: ignore[arg-type]
    steps = {
        "torchtitan": titan_step(trainer),
        "autopar, same layout": own_step(config, state, same),
        "autopar, its own plan": own_step(config, state, autopar.Options()),
    }
    losses = {who: [step() for _ in range(WARMUP)] for who, step in steps.items()}
    expected = torch.tensor(losses["torchtitan"])
    error = max(float((torch.tensor(found) / expected - 1).abs().max()) for found in losses.values())
    if error > TOLERANCE:
        raise RuntimeError(f"{name}: losses differ by {error:.1e} (relative): {losses}")
    seconds: dict[str, list[float]] = {who: [] for who in steps}
    for _ in range(rounds):
        for who, step in steps.items():
            seconds[who].append(_seconds(step))
    trainer.close()
    medians = {who: statistics.median(found) for who, found in seconds.items()}
    ratios = {who: found / medians["torchtitan"] for who, found in medians.items() if who != "torchtitan"}
    found = {"layout": str(layout), "losses": losses, "largest_error": error}
    return {**found, "median_seconds": medians, "ratio_to_torchtitan": ratios}


def report(found: Mapping[str, dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Prints and writes the figures."""
    rows = list(_rows(found))
    columns = ("torchtitan's layout", "loop", "ms per step", "x torchtitan", "losses within")
    caption = f"median of {arguments.rounds} alternating steps, {PROCESSES} processes"
    table = make_table("torchtitan's Llama 3 (debugmodel)", columns, rows, caption)
    figures = {"benchmark": "torchtitan_loop", "processes": PROCESSES, "rounds": arguments.rounds}
    emit({**figures, "machine": describe_machine(), "layouts": found}, table, arguments.json, arguments.output)


def _rows(found: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name, each in found.items():
        for who, seconds in each["median_seconds"].items():
            ratio = each["ratio_to_torchtitan"].get(who, 1.0)
            yield name, who, f"{seconds * 1e3:.1f}", f"{ratio:.2f}", f"{each['largest_error']:.0e}"


def run(arguments: argparse.Namespace) -> None:
    """What each process does."""
    load_torchtitan()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)  # As torchtitan does.
    found = {name: figures_of(name, arguments.rounds) for name in arguments.layouts}
    if dist.get_rank() == 0:
        report(found, arguments)
    dist.barrier()
    dist.destroy_process_group()


def main(words: Sequence[str]) -> int:
    """Starts four processes of itself, unless this is one of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torchtitan_loop")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", metavar="FILE", help="write the JSON there as well")
    arguments = parser.parse_args(words)
    return run_as_ranks("benchmarks.torchtitan_loop", words, PROCESSES, lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
