"""A training loop that changes what forward reads: eager execution follows, and so must a parallel model."""

import os
import random
import sys

import torch
import torch.distributed as dist
from torch import nn

import autopar


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.act, self.skip = nn.ReLU(), 0.0

    def forward(self, x):
        if self.skip and random.random() < self.skip:
            return x
        return x + self.down(self.act(self.norm(self.up(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.aux = nn.ModuleList([Block(), Block()]), nn.Linear(8, 4)
        self.beta, self.use_aux, self.gains, self.mask = 1.0, True, [1.0], torch.ones(8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * self.gains[0] * self.mask
        loss = self.beta * x.square().mean()
        return {"loss": loss + self.aux(x).abs().mean() if self.use_aux else loss, "x": x}


world = int(os.environ["WORLD_SIZE"])
options = autopar.Options(stages=2, microbatches=2) if "stages" in sys.argv else autopar.Options(zero=3)
dist.init_process_group("gloo")
weights = [Net().state_dict()]
dist.broadcast_object_list(weights)
net, eager = Net(), Net()
net.load_state_dict(weights[0])
eager.load_state_dict(weights[0])
model = autopar.parallelize(net, (world,), options=options)
x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def compare(what):
    eager.zero_grad()
    model.zero_grad()
    expected = eager(x)["loss"]
    expected.backward()
    found = model.step(x)
    assert abs(found - expected) <= 1e-5 * abs(expected), (what, found, expected)
    for (name, one), other in zip(eager.named_parameters(), model.parameters(), strict=True):
        gradient = torch.zeros_like(one) if other.grad is None else model.full_tensor(other.grad)
        wanted = torch.zeros_like(one) if one.grad is None else one.grad
        assert (gradient - wanted).abs().max() <= 1e-5 * wanted.abs().max(), (what, name)


compare("as it was")
for one in (model, eager):
    one.beta = 3.0
compare("a number")
made = len(model.programs())
for one in (model, eager):
    one.beta = 1.0
compare("a number as it was")
assert len(model.programs()) == made
for one in (model, eager):
    one.use_aux = False
compare("a flag")
for one in (model, eager):
    one.use_aux, one.blocks[1].norm.eps, one.gains[0] = True, 0.5, 2.0
    one.mask[0], one.blocks[0].act = 0.0, nn.GELU()
compare("parts of modules, a list, a tensor, a module")
model.eval()
eager.eval()
with torch.no_grad():
    assert torch.allclose(model(x)["x"], eager(x)["x"], rtol=1e-5, atol=1e-6)
model.train()

model.blocks[0].skip = 0.5
try:
    model.step(x)
except autopar.AutoparError as error:
    assert "random.random() < self.skip" in str(error) and "blocks.0" in str(error), error
else:
    raise AssertionError("what was drawn once is kept")
model.blocks[0].skip, model.blocks[0].down = 0.0, nn.Linear(16, 8)
try:
    model.step(x)
except autopar.AutoparError as error:
    assert "blocks.0.down.weight" in str(error), error
else:
    raise AssertionError("a module that came later was trained")
if dist.get_rank() == 0:
    print("fine")
dist.destroy_process_group()
