"""A script that comes from DDP: a DataLoader with a DistributedSampler, a loss of one's own, two epochs, evaluation."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopar

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data = torch.Generator().manual_seed(7)
dataset = TensorDataset(torch.randn(40, 12, generator=data), torch.randint(0, 5, (40,), generator=data))
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=16 // world, sampler=sampler)

net = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5))
plain = copy.deepcopy(net)
model = autopar.parallelize(net, init_device_mesh("cpu", (world,)))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)

for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for x, y in loader:
        (x_all,), (y_all,) = model.from_local(x), model.from_local(y)
        loss = criterion(model(x_all), y_all.full_tensor())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # What one process does with the same samples.
        expected = criterion(plain(x_all.full_tensor()), y_all.full_tensor())
        expected.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        if rank == 0:
            torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
    model.eval()
    with torch.no_grad():
        accuracy = (model(dataset.tensors[0]).argmax(-1) == dataset.tensors[1]).float().mean()

for name, parameter in model.named_parameters():
    whole = parameter.full_tensor().detach()
    if rank == 0:
        torch.testing.assert_close(whole, plain.get_parameter(name).detach(), rtol=1e-4, atol=1e-5)
    weights = [torch.empty_like(whole) for _ in range(world)]
    dist.all_gather(weights, whole.contiguous())
    assert all(torch.equal(one, weights[0]) for one in weights), name
if rank == 0:
    print("fine", float(accuracy))
dist.destroy_process_group()
