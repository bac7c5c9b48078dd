"""Fine-tuning a model of Hugging Face: frozen embeddings, groups of parameters, accumulated gradients, clipping, a
schedule, a checkpoint that a second model goes on from."""

import copy
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)
net = LlamaForCausalLM(config)
net.model.embed_tokens.requires_grad_(False)
net.model.layers[0].requires_grad_(False)
plain = copy.deepcopy(net)
random = torch.Generator().manual_seed(5)
batches = [torch.randint(0, 64, (8, 10), generator=random) for _ in range(8)]


def groups(model):
    decayed = [p for n, p in model.named_parameters() if p.requires_grad and "norm" not in n]
    others = [p for n, p in model.named_parameters() if p.requires_grad and "norm" in n]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}]


def tools(model):
    if isinstance(model, LlamaForCausalLM):
        optimizer = torch.optim.AdamW(groups(model), lr=5e-3)
    else:
        optimizer = model.optimizer(torch.optim.AdamW, params=groups(model), lr=5e-3)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=4)


def train(model, optimizer, schedule, batches):
    model.train()
    losses = []
    for index, tokens in enumerate(batches):
        loss = model(input_ids=tokens, labels=tokens).loss / 2
        loss.backward()
        losses.append(loss.item())
        if index % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses


def same(found, expected):
    if rank == 0:
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-5)


model = autopar.parallelize(net, mesh)
mine, theirs = tools(model), tools(plain)
same(train(model, *mine, batches[:4]), train(plain, *theirs, batches[:4]))

state = {
    name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    for name, tensor in model.state_dict().items()
}
if rank == 0:
    torch.save(state, "checkpoint.pt")
dist.barrier()
loaded = LlamaForCausalLM(config)
loaded.load_state_dict(torch.load("checkpoint.pt"))
resumed = autopar.parallelize(loaded, mesh)
with torch.no_grad():
    same(
        resumed(input_ids=batches[0], labels=batches[0]).loss,
        plain.eval()(input_ids=batches[0], labels=batches[0]).loss,
    )
same(train(model, *mine, batches[4:]), train(plain, *theirs, batches[4:]))
for name, parameter in model.named_parameters():
    same(parameter.full_tensor().detach(), plain.get_parameter(name).detach())
dist.barrier()
if rank == 0:
    os.remove("checkpoint.pt")
    print("fine")
dist.destroy_process_group()
