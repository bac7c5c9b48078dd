"""Two epochs over 22 samples in batches of 8, so that the last has 6: evaluation first, a criterion with targets, then
a loss of one's own; the same is done on one device."""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar

world = int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(1)  # Every rank reads the same data.
net = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
data = TensorDataset(torch.randn(22, 12), torch.randint(0, 4, (22,)))
reference, criterion = copy.deepcopy(net), nn.CrossEntropyLoss()

model = autopar.parallelize(net, (world,), loss_fn=criterion)
theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
ours = model.optimizer(torch.optim.SGD, lr=0.1)


def accuracy(network):
    network.eval()
    with torch.no_grad():
        hits = sum(int((network(x).argmax(-1) == y).sum()) for x, y in DataLoader(data, batch_size=8))
    network.train()
    return hits / len(data)


assert accuracy(model) == accuracy(reference)
for epoch in range(2):
    for x, y in DataLoader(data, batch_size=8):
        if epoch == 0:
            loss = model.step(x, targets=y)
        else:
            loss = criterion(model(x), y)
            loss.backward()
        ours.step()
        ours.zero_grad()
        expected = criterion(reference(x), y)
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
for name, value in model.state_dict().items():
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    torch.testing.assert_close(whole, reference.state_dict()[name], rtol=1e-4, atol=1e-6)
assert accuracy(model) == accuracy(reference)
if not dist.is_initialized() or dist.get_rank() == 0:
    for program in model.programs():
        print(program)
    print("fine")
