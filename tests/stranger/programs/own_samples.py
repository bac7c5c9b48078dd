"""A training script that used DDP: each rank reads its own samples with a DistributedSampler."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopar


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.body(x), y)


mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
rank, world = dist.get_rank(), dist.get_world_size()
known = torch.Generator().manual_seed(0)
dataset = TensorDataset(torch.randn(48, 32, generator=known), torch.randint(0, 10, (48,), generator=known))
net = Net()
model = autopar.parallelize(net, mesh)
optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, shuffle=True))

# As under DDP: every rank would train on other numbers.
if world > 1:
    try:
        model.step(*next(iter(loader)))
    except autopar.InputMismatchError as error:
        assert "other values than rank 0" in str(error) and "model.from_local" in str(error), error
    else:
        raise SystemExit("different batches were accepted in silence")

# One process with everybody's samples, from rank 0's weights, which all ranks have.
reference = Net()
with torch.no_grad():
    whole = next(iter(loader))
    model(*model.from_local(*whole))
reference.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
alone = torch.optim.SGD(reference.parameters(), lr=0.1)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        batch = model.from_local(x, y)
        loss = model.step(*batch)
        optimizer.step()
        optimizer.zero_grad()
        wanted = reference(*(part.full_tensor() for part in batch))
        wanted.backward()
        alone.step()
        alone.zero_grad()
        torch.testing.assert_close(loss, wanted.detach())
losses = [None] * world
dist.all_gather_object(losses, float(loss))
assert len(set(losses)) == 1, losses

# The model's own sampler: each sample is read by one rank, in the order of one process.
sampler = model.sampler(dataset, batch_size=16, shuffle=True)
seen = []
for ids in DataLoader(torch.arange(48), batch_sampler=sampler):
    (joined,) = sampler.from_local(ids)
    seen += joined.full_tensor().tolist()
assert sorted(seen) == list(range(48)) and seen != sorted(seen)
if rank == 0:
    print("fine", losses[0])
dist.destroy_process_group()
