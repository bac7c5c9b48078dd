"""A language model generates on several processes, and says how fast.

    torchrun --nproc-per-node 2 examples/generate.py --tokens 32
    torchrun --nproc-per-node 2 examples/generate.py --model path/of/a/saved/model --prompt "def main(" --stages 2

Without ``--model`` it is a small Llama with random weights, which says nothing of interest.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import autopar

SMALL = LlamaConfig(
    vocab_size=1024, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, pad_token_id=0, eos_token_id=None, bos_token_id=None,
)  # fmt: skip


def model_and_prompts(arguments: argparse.Namespace) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """The model, and the prompts as it reads them, padded on the left."""
    if arguments.model is None:
        torch.manual_seed(0)
        return LlamaForCausalLM(SMALL), {"input_ids": torch.randint(1, 1024, (arguments.rows, 16))}
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = tokenizer([arguments.prompt] * arguments.rows, return_tensors="pt", padding=True)
    return AutoModelForCausalLM.from_pretrained(arguments.model), dict(prompts)


def main() -> None:
    """Generates twice: the first call plans and compiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder of save_pretrained, or a name on the Hugging Face Hub")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--rows", type=int, default=4, help="how many sequences")
    parser.add_argument("--tokens", type=int, default=32, help="how many new tokens of each")
    parser.add_argument("--stages", type=int, help="pipeline stages; default: whatever is fastest")
    arguments = parser.parse_args()
    plain, prompts = model_and_prompts(arguments)
    length = prompts["input_ids"].shape[1] + arguments.tokens
    options = autopar.Options(stages=arguments.stages, cache_length=length)
    model = autopar.parallelize(plain, int(os.environ.get("WORLD_SIZE", "1")), mode="inference", options=options)
    for _ in range(2):
        torch.manual_seed(0)
        begin = time.perf_counter()
        tokens = model.generate(**prompts, max_new_tokens=arguments.tokens, do_sample=True, top_k=50)
        seconds = time.perf_counter() - begin
    if int(os.environ.get("RANK", "0")) == 0:
        print(model.plan)
        print(f"{tokens.shape[0] * (tokens.shape[1] - prompts['input_ids'].shape[1]) / seconds:.1f} tokens per second")


if __name__ == "__main__":
    main()
