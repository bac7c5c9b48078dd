"""A rank whose batch is shorter: the last one of its own share of the data. python ranks_disagree.py [stages]"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
options = autopar.Options(stages=2, microbatches=2) if "stages" in sys.argv else autopar.Options()
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
model = autopar.parallelize(net, mesh, options=options, loss_fn=lambda output: output.square().mean())
if "later" in sys.argv:
    model.step(torch.ones(8, 8))
loss = model.step(torch.ones(8 - 2 * dist.get_rank(), 8))
print("fine", float(loss))
