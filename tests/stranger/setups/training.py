"""What a training script has before it comes to the block: a model, a mesh, and batches that are alike on all ranks."""

import torch
import torch.distributed as dist  # noqa: F401
import torch.nn.functional as F  # noqa: F401
from torch import nn  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autopar  # noqa: F401

config = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)
model = LlamaForCausalLM(config)
mesh = init_device_mesh("cpu", (2, 2))
tokens = torch.randint(0, 128, (3, 8, 16), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": batch, "labels": batch} for batch in tokens]
batch = data[0]
