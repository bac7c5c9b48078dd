"""A large model that only exists as shapes."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar  # noqa: F401


class Model(GPT2LMHeadModel):
    def forward(self, ids, labels):
        return super().forward(input_ids=ids, labels=labels).loss


with torch.device("meta"):
    model = Model(GPT2Config(n_layer=96, n_embd=12288, n_head=96, n_positions=2048, use_cache=False))
    ids = labels = torch.zeros(1536, 2048, dtype=torch.long)
