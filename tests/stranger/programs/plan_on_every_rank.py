"""Every rank makes the plan itself; then a second model of the same kind."""

import torch
import torch.distributed as dist
from torch import nn

import autopar

dist.init_process_group("gloo")
world = dist.get_world_size()
x, y = torch.ones(8, 16), torch.zeros(8, 1)


def loss_fn(output):
    return (output - y).square().mean()


def train(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    expected = loss_fn(model(x))
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    plan = autopar.plan(model, (world,), (x,), loss_fn=loss_fn)
    parallel = autopar.parallelize(model, (world,), plan=plan, loss_fn=loss_fn)
    loss = parallel.step(x)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-7)
    for parameter, gradient in zip(parallel.parameters(), gradients, strict=True):
        torch.testing.assert_close(parallel.full_tensor(parameter.grad), gradient, rtol=1e-5, atol=1e-7)


train(0)
train(1)
print("fine")
dist.destroy_process_group()
