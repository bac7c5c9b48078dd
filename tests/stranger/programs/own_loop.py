"""Evaluation before training, a criterion outside of the model, sequences of changing lengths, a smaller last batch, an
optional mask, a flag."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.mix = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 7)

    def forward(self, tokens, mask=None, temperature=1.0, log=False):
        hidden = self.mix(self.embed(tokens))
        if mask is not None:
            hidden = hidden * mask.unsqueeze(-1)
        scores = self.head(hidden) / temperature
        return scores.log_softmax(-1) if log else scores


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
net = Tagger()
plain = copy.deepcopy(net)
model = autopar.parallelize(net, init_device_mesh("cpu", (world,)))
criterion = nn.CrossEntropyLoss()
optimizer = model.optimizer(torch.optim.SGD, lr=0.05)
plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
random = torch.Generator().manual_seed(3)


def batch(size, length):
    shape = (size, length)
    return torch.randint(0, 50, shape, generator=random), torch.randint(0, 7, shape, generator=random)


def same(found, expected):
    if rank == 0:  # the ranks' plain models began with other weights
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-5, atol=1e-5)


tokens, tags = batch(8, 6)
for one in (model, plain):
    one.eval()
with torch.no_grad():
    same(model(tokens), plain(tokens))
for one in (model, plain):
    one.train()

calls = [
    ((8, 6), {}),
    ((8, 9), {}),
    ((8, 6), {"temperature": 2.0}),
    ((8, 6), {"temperature": 0.5, "log": True}),
    ((8, 6), {"mask": True}),
    ((3, 6), {}),
    ((8, 6), {}),
]
for (size, length), keywords in calls:
    tokens, tags = batch(size, length)
    if "mask" in keywords:
        keywords = {"mask": (tokens > 5).float()}
    losses = []
    for one, its_optimizer in ((model, optimizer), (plain, plain_optimizer)):
        loss = criterion(one(tokens, **keywords).transpose(1, 2), tags)
        loss.backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
        losses.append(loss)
    same(*losses)
for name, parameter in model.named_parameters():
    same(parameter.full_tensor(), plain.get_parameter(name))
if rank == 0:
    print("fine", losses[0].item())
dist.destroy_process_group()
