"""Two models and two optimizers in one process, one model's output in the other's loss; attributes that training
changes; hooks on a parameter and on a module; then both are called without torch.distributed having been asked for."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6))
        self.scale = 1.0

    def forward(self, noise):
        return self.scale * self.net(noise)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
nets = Generator(), nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(), nn.Linear(16, 1))
plain = copy.deepcopy(nets)
for pair in (nets, plain):
    pair[0].net[0].weight.register_hook(lambda gradient: gradient * 0.5)
models = tuple(autopar.parallelize(net, mesh) for net in nets)
random = torch.Generator().manual_seed(11)
noises = [torch.randn(8, 4, generator=random) for _ in range(3)]
reals = [torch.randn(8, 6, generator=random) for _ in range(3)]


def train(generator, critic):
    optimizers = torch.optim.Adam(generator.parameters(), lr=1e-2), torch.optim.Adam(critic.parameters(), lr=1e-2)
    losses = []
    for step, (noise, real) in enumerate(zip(noises, reals, strict=True)):
        generator.scale = 1.0 + step
        loss = nn.functional.softplus(-critic(real)).mean()
        loss = loss + nn.functional.softplus(critic(generator(noise).detach())).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        fooled = nn.functional.softplus(-critic(generator(noise))).mean()
        fooled.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()
        losses += [loss.item(), fooled.item()]
    return losses


found, expected = train(*models), train(*plain)
if rank == 0:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
for model, other in zip(models, plain, strict=True):
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor()
        if rank == 0:
            torch.testing.assert_close(whole, other.get_parameter(name), rtol=1e-4, atol=1e-5)
if rank == 0:
    print("fine", found[-1])
