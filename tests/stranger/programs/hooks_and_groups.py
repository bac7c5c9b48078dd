"""A loop with what people add to loops: hooks on parameters, groups with weight decay, accumulated gradients, clipping,
an average of the weights; and a model of Hugging Face that writes text and is saved. All as eager does it."""

import copy
import os
import shutil

import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel
from transformers import GPT2Config, GPT2LMHeadModel

import autopar

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
config = GPT2Config(
    vocab_size=48,
    n_positions=24,
    n_embd=32,
    n_layer=1,
    n_head=2,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
)
net = GPT2LMHeadModel(config)
plain = copy.deepcopy(net)
random = torch.Generator().manual_seed(3)
batches = torch.randint(1, 48, (4, 8, 12), generator=random)


def groups(model):
    named = list(model.named_parameters())
    decayed = [p for n, p in named if p.dim() > 1]
    others = [p for n, p in named if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}]


def watch(model, finished):
    """Damps one gradient, and masks another, by hooks; counts the gradients that are finished."""
    mask = (torch.arange(48) % 2).float()[:, None]
    model.get_parameter("transformer.wte.weight").register_hook(lambda gradient: gradient * mask)
    model.get_parameter("transformer.h.0.mlp.c_fc.weight").register_hook(lambda gradient: gradient * 0.5)
    bias = model.get_parameter("transformer.h.0.mlp.c_fc.bias")
    bias.register_post_accumulate_grad_hook(lambda parameter: finished.append(tuple(parameter.grad.shape)))


def average(kept, new, _count):
    return kept.lerp(new, 0.25)


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def same(found, expected, what):
    if rank == 0:  # Every rank draws weights of its own, and the first rank's count.
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-5, msg=lambda text: f"{what}: {text}")


def same_parameters(found, expected, what):
    named = dict(found.named_parameters())
    for name, parameter in expected.named_parameters():
        same(whole(named[name]), parameter.detach(), f"{what} {name}")


mine, theirs = [], []
watch(net, mine)  # Before it is parallelized, as a library would; it counts all the same.
watch(plain, theirs)
model = autopar.parallelize(net, (world,))
optimizer = model.optimizer(torch.optim.AdamW, params=groups(model), lr=5e-3)
reference = torch.optim.AdamW(groups(plain), lr=5e-3)
ema, plain_ema = AveragedModel(model, avg_fn=average), AveragedModel(plain, avg_fn=average)

for first, second in (batches[:2], batches[2:]):
    losses = []
    for tokens in (first, second):
        loss = model.step(input_ids=tokens, labels=tokens, scale=0.5)
        expected = plain(input_ids=tokens, labels=tokens).loss
        (expected * 0.5).backward()
        same(loss, expected.detach(), "loss")
    for name, parameter in plain.named_parameters():
        same(whole(model.get_parameter(name).grad), parameter.grad, f"gradient {name}")
    same(whole(model.clip_grad_norm_(0.5)), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5), "norm")
    for one in (optimizer, reference):
        one.step()
        one.zero_grad()
    ema.update_parameters(model)
    plain_ema.update_parameters(plain)
assert mine == theirs == [(128,)] * 4, (mine, theirs)
same_parameters(model, plain, "parameter")
same_parameters(ema.module, plain_ema.module, "average")

model.eval(), plain.eval()
prompt = batches[0, :2, :4]
settings = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
same(model.generate(prompt, **settings), plain.generate(prompt, **settings), "text")
with model.full_params() as original, torch.no_grad():
    cache = original(input_ids=prompt).past_key_values
    assert cache.get_seq_length() == 4

model.save_pretrained("saved")
dist.barrier()
loaded = GPT2LMHeadModel.from_pretrained("saved")
same_parameters(loaded, plain, "saved")
dist.barrier()
if rank == 0:
    assert os.path.exists("saved/config.json")
    shutil.rmtree("saved")
    print("fine")
dist.destroy_process_group()
