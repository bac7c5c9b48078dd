"""The file that commands take as model.py:make."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make(layers=2):
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    tokens = torch.randint(0, 128, (64, 16))
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}
