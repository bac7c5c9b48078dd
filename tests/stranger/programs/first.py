"""The README's call on a model of one's own: no seed, nothing else."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.body(x), y)


mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
model = autopar.parallelize(Net(), mesh)
optimizer = model.optimizer(torch.optim.AdamW, lr=3e-4)
data = torch.Generator().manual_seed(0)
for _ in range(3):
    loss = model.step(torch.randn(16, 32, generator=data), torch.randint(0, 10, (16,), generator=data))
    optimizer.step()
    optimizer.zero_grad()
losses = [None] * dist.get_world_size()
dist.all_gather_object(losses, float(loss))
assert len(set(losses)) == 1, losses
if dist.get_rank() == 0:
    print("fine", losses[0])
dist.destroy_process_group()
