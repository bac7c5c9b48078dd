"""The gallery of plans: ``python -m benchmarks.gallery [--output FOLDER] [NAME...]``.

Plans well-known models on the meta device for described clusters, and writes the page of each, its JSON, and an index.
No devices are needed. Each plan is made in a process of its own, so that memory is given back.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .planning import build_gpt2, build_llama3_8b, token_batch

Built = tuple[nn.Module, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Exhibit:
    """A model and the cluster it is planned for."""

    build: Callable[[], Built]
    title: str
    mesh: tuple[int, ...]
    cluster: str
    options: Mapping[str, Any] = field(default_factory=dict)


def _causal(config: Any, batch: int, sequence: int) -> Built:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config), token_batch(batch, sequence)


def build_llama3_405b() -> Built:
    """The shape of Llama 3 405B."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    return _causal(config, 512, 8192)


def build_gpt_1t() -> Built:
    """A GPT of a trillion parameters: the largest of Narayanan et al. 2021, table 1, with its batch."""
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=51200,
        n_positions=2048,
        n_embd=25600,
        n_layer=128,
        n_head=160,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return _causal(config, 3072, 2048)


def build_mixtral() -> Built:
    """Mixtral 8x7B."""
    from transformers import MixtralConfig

    config = MixtralConfig(use_cache=False, max_position_embeddings=4096, experts_implementation="grouped_mm")
    return _causal(config, 64, 4096)


def build_vit() -> Built:
    """ViT-L/16 on images of 224 x 224."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1000
    )
    with torch.device("meta"):
        images, labels = torch.empty(1024, 3, 224, 224), torch.empty(1024, dtype=torch.long)
        return ViTForImageClassification(config), {"pixel_values": images, "labels": labels}


def build_t5() -> Built:
    """T5 Large."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024,
        d_ff=4096,
        d_kv=64,
        num_layers=24,
        num_heads=16,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    with torch.device("meta"):
        return T5ForConditionalGeneration(config), token_batch(128, 512)


BF16 = {"precision": "bf16"}
EXHIBITS: Mapping[str, Exhibit] = {
    "gpt2": Exhibit(build_gpt2, "GPT-2 on 64 A100", (8, 8), "dgx-a100-80gb"),
    "llama3-8b": Exhibit(build_llama3_8b, "Llama 3 8B on 64 A100", (8, 8), "dgx-a100-80gb", BF16),
    "vit": Exhibit(build_vit, "ViT-L/16 on 16 A100", (2, 8), "dgx-a100-80gb", BF16),
    "t5": Exhibit(build_t5, "T5 Large on 16 A100", (2, 8), "dgx-a100-80gb", BF16),
    "mixtral": Exhibit(build_mixtral, "Mixtral 8x7B on 64 H100", (8, 8), "dgx-h100", BF16),
    "llama3-405b": Exhibit(
        build_llama3_405b,
        "Llama 3 405B on 2048 H100",
        (256, 8),
        "dgx-h100",
        {**BF16, "stages": 16, "microbatches": 32, "schedule": "1f1b"},
    ),
    "gpt-1t": Exhibit(
        build_gpt_1t,
        "GPT of a trillion parameters on 3072 A100",
        (384, 8),
        "dgx-a100-80gb",
        {**BF16, "stages": 64, "microbatches": 512, "schedule": "1f1b"},
    ),
}


def make(name: str, folder: Path) -> str:
    """Makes one exhibit in this process; its line in the index."""
    import autopar

    exhibit = EXHIBITS[name]
    model, batch = exhibit.build()
    began = time.perf_counter()
    options = autopar.Options(**exhibit.options)
    plan = autopar.plan(model, exhibit.mesh, batch, cluster=exhibit.cluster, options=options)
    seconds = time.perf_counter() - began
    page = folder / f"{name}.html"
    plan.to_html(page)
    (folder / f"{name}.json").write_text(plan.to_json())
    step, kib = plan.predicted.step_seconds, page.stat().st_size / 1024
    return f"{exhibit.title}: a step of {step:.3g} s, planned in {seconds:.0f} s, page of {kib:.0f} KiB"


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXHIBITS)}; default: all")
    parser.add_argument("--output", type=Path, default=Path("docs/_build/gallery"))
    parser.add_argument("--here", action="store_true", help="make one exhibit in this process")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    names = arguments.names or list(EXHIBITS)
    if arguments.here:
        print(make(names[0], arguments.output), flush=True)
        return
    for name in names:
        command = [sys.executable, "-m", "benchmarks.gallery", "--here", "--output", str(arguments.output), name]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
