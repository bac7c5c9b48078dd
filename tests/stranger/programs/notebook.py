"""Cells of a notebook: one process, no launcher, classes without a source file, cells run twice."""

FIRST = """
import torch, autopar
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    def forward(self, x, y):
        return nn.functional.cross_entropy(self.body(x), y)

net = Net()
x, y = torch.randn(10, 6), torch.randint(0, 3, (10,))
"""
SECOND = """
import copy
plain = copy.deepcopy(net)
model = autopar.parallelize(copy.deepcopy(net), (1,))
optimizer = model.optimizer(torch.optim.Adam, lr=0.1)
loss = model.step(x, y)
expected = plain(x, y)
expected.backward()
torch.testing.assert_close(loss.detach(), expected.detach())
torch.testing.assert_close(model.body[0].weight.grad.full_tensor(), plain.body[0].weight.grad)
optimizer.step()
"""
THIRD = """
print(autopar.plan(net, (2, 2), (x, y)))
print(repr(model)[:200], model.programs())
"""
cells = {"__name__": "__main__"}
for number, cell in enumerate((FIRST, SECOND, SECOND, THIRD)):
    exec(compile(cell, f"<ipython-input-{number}>", "exec"), cells)
print("fine")
