"""One process: the lowered program against the eager model and against ``torch.compile``.

    python -m benchmarks.one_process [--models GPT-2 Llama ...] [--variants ...] [--rounds 10] [--json] [--output FILE]

Nothing is divided on a mesh of one, so what differs is how the same step runs: operation by operation as the user wrote
it (eager), as autopar's program, as that with compiled sections, and as torch.compile compiles it. A step is forward
and backward. All variants of a model take turns in an order drawn anew every round; a figure is the median over the
rounds of a variant's seconds divided by eager's in the same round. Before anything is timed, each variant's loss and
gradients must equal eager's, up to the rounding that eager's have themselves where code is compiled. With ``--output``
the file is written anew after each model.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar

from .report import describe_machine, emit, make_table

Batch = Mapping[str, Tensor]
Step = Callable[[], Tensor]
# A loss, and gradients by parameter.
Result = tuple[Tensor, Mapping[str, Tensor]]
VARIANTS = ("eager", "autopar", "autopar compiled", "torch.compile")
# Of the largest gradient. Compiled code sums in another order, so it may be off by what eager itself is off from double
# precision, a few times: 2e-2 for ResNet-50, whose many batch norms make small differences large.
TOLERANCE, COMPILED_TOLERANCE, ROUNDING = 1e-5, 1e-3, 4.0


def tokens(vocabulary: int, batch: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids}


def images(batch: int, size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, 10, (batch,))}


def gpt2(layers: int = 4) -> tuple[nn.Module, Batch]:
    config = transformers.GPT2Config(
        vocab_size=8000, n_positions=128, n_embd=256, n_layer=layers, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), tokens(8000, 8, 128)


def llama(layers: int = 4) -> tuple[nn.Module, Batch]:
    config = transformers.LlamaConfig(
        vocab_size=8000, hidden_size=256, intermediate_size=688, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), tokens(8000, 8, 128)


def bert(layers: int = 4) -> tuple[nn.Module, Batch]:
    config = transformers.BertConfig(
        vocab_size=8000, hidden_size=256, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=1024,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), tokens(8000, 8, 128)


def vit(layers: int = 4) -> tuple[nn.Module, Batch]:
    config = transformers.ViTConfig(
        hidden_size=256, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=1024, image_size=64,
        patch_size=8, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), images(8, 64)


def resnet(layers: int = 2) -> tuple[nn.Module, Batch]:
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128, 256], depths=[layers] * 3, num_labels=10,
        downsample_in_first_stage=False,
    )  # fmt: skip
    return transformers.ResNetForImageClassification(config), images(8, 64)


def resnet50() -> tuple[nn.Module, Batch]:
    """As people train it, and large enough that what a call costs beside computing does not count."""
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=10)), images(4, 224)


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "GPT-2": gpt2,
    "Llama": llama,
    "BERT": bert,
    "ViT": vit,
    "ResNet": resnet,
    "ResNet-50": resnet50,
}


def parallel(model: nn.Module, batch: Batch, compiled: bool) -> nn.Module:
    mesh, options = init_device_mesh("cpu", (1,)), autopar.Options(compile=compiled)
    return autopar.parallelize(model, mesh, example_inputs=dict(batch), options=options)


def make_variant(name: str, model: nn.Module, batch: Batch) -> nn.Module:
    match name:
        case "eager":
            return model
        case "torch.compile":
            compiled: Any = torch.compile(model)
            return compiled  # type: ignore[no-any-return]
    return parallel(model, batch, name == "autopar compiled")


def step_of(model: nn.Module, batch: Batch) -> Step:
    """Forward and backward."""

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = model(**batch).loss
        loss.backward()
        return loss.detach()

    return step


def gradients(model: nn.Module) -> dict[str, Tensor]:
    named = {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for name, grad in named.items()}


def difference(expected: Result, found: Result) -> float:
    """The largest difference of two losses, relative, or of two gradients, relative to the largest value of any."""
    largest = max(float(grad.abs().max()) for grad in expected[1].values())
    errors = [float((found[1][key] - grad).abs().max()) / largest for key, grad in expected[1].items()]
    return max(abs(float(found[0] / expected[0]) - 1), *errors)


def in_double(model: str) -> Result:
    """The loss and gradients of the eager model in double precision."""
    torch.manual_seed(0)
    module, batch = MODELS[model]()
    wide = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    loss = step_of(module.double(), wide)()
    return loss, gradients(module)


def make_steps(model: str, variants: Sequence[str]) -> tuple[dict[str, Step], dict[str, float], dict[str, float]]:
    """The step of each variant, checked; how far it is from eager's (eager's: from double precision); and the seconds
    of its first step, which compiles."""
    steps, errors, first = {}, {}, {}
    expected, allowed = in_double(model), math.inf
    for name in variants:
        torch.manual_seed(0)
        module, batch = MODELS[model]()
        start = time.perf_counter()
        running = make_variant(name, module, batch)
        steps[name] = step_of(running, batch)
        loss = steps[name]()
        first[name] = time.perf_counter() - start
        found = loss, gradients(running)
        errors[name] = difference(expected, found)
        if name == "eager":
            expected, allowed = found, ROUNDING * errors[name]
        elif not errors[name] < (max(COMPILED_TOLERANCE, allowed) if "compile" in name else TOLERANCE):
            raise RuntimeError(f"{name} does not compute what eager does: error {errors[name]:.1e}")
    return steps, errors, first


def measure(steps: Mapping[str, Step], rounds: int, count: int) -> dict[str, list[float]]:
    """Seconds of a step of each variant in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds):
        for name in random.Random(index).sample(list(steps), len(steps)):
            steps[name]()
            start = time.perf_counter()
            for _ in range(count):
                steps[name]()
            seconds[name].append((time.perf_counter() - start) / count)
    return seconds


def figures_of(model: str, variants: Sequence[str], rounds: int, count: int) -> dict[str, object]:
    steps, errors, first = make_steps(model, variants)
    seconds = measure(steps, rounds, count)
    against = {
        name: statistics.median(own / eager for own, eager in zip(each, seconds["eager"], strict=True))
        for name, each in seconds.items()
    }
    eager = statistics.median(seconds["eager"])
    return {"model": model, "eager_seconds": eager, "of_eager": against, "errors": errors, "first_step_seconds": first}


def report(rows: Sequence[Mapping[str, object]], variants: Sequence[str], as_json: bool, path: str | None) -> None:
    cells = [[str(row["model"]), *(f"{row['of_eager'][name]:.2f}" for name in variants)] for row in rows]  # type: ignore[index]
    table = make_table("Seconds of a step, as a share of eager's", ["model", *variants], cells)
    emit({"machine": describe_machine(), "models": list(rows)}, table, as_json, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="steps of a variant in a round")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    variants = ["eager", *(name for name in chosen.variants if name != "eager")]
    rows = []
    for model in chosen.models:
        rows.append(figures_of(model, variants, chosen.rounds, chosen.steps))
        report(rows, variants, chosen.json, chosen.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
