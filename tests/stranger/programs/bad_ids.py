"""A tokenizer with more tokens than the model has: eager execution raises IndexError."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, ids, labels):
        return nn.functional.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())


world = int(os.environ["WORLD_SIZE"])
mesh = init_device_mesh("cpu", (2, world // 2) if world > 1 else (1,))
pins = {"embed.weight": "R,S(0)"} if world > 1 else {}
model = autopar.parallelize(Model(), mesh, options=autopar.Options(pins=pins, mesh_search=False))
ids = torch.arange(8 * 6).reshape(8, 6)
model.step(ids, ids)
optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
for place in range(2):
    batch = [ids.clone(), ids.clone()]
    batch[place][7, 5] = 64
    try:
        model.step(*batch)
    except IndexError as error:
        assert isinstance(error, autopar.AutoparError) and "index 64 is out of range, not 0 <= index < 64" in str(error)
    else:
        raise SystemExit("an index out of range was accepted in silence")
optimizer.step()
loss = model.step(ids, ids)
assert bool(loss.isfinite())
if dist.get_rank() == 0:
    print("fine", float(loss))
