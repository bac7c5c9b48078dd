"""The same script before its author has read anything: each rank gives its own samples."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopar

dist.init_process_group("gloo")
dataset = TensorDataset(torch.randn(32, 12), torch.randint(0, 5, (32,)))
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
model = autopar.parallelize(nn.Linear(12, 5), init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("not fine")
