"""Plain models that generate, and that have derivatives of their own in the loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from .plain import BATCH, floats, model, whole

STEPS = 50


class Block(nn.Module):
    """A residual block that is told the time."""

    def __init__(self, taken: int, given: int, time: int) -> None:
        super().__init__()
        self.first, self.shift = nn.Conv2d(taken, given, 3, padding=1), nn.Linear(time, 2 * given)
        self.norm, self.second = nn.GroupNorm(4, given), nn.Conv2d(given, given, 3, padding=1)
        self.skip = nn.Conv2d(taken, given, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.shift(F.silu(time))[:, :, None, None].chunk(2, 1)
        return self.skip(x) + self.second(F.silu(self.norm(self.first(x)) * (1 + scale) + shift))  # type: ignore[no-any-return]


class PixelAttention(nn.Module):
    """Attention among pixels, heads folded into the batch."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.mix, self.out = heads, nn.Conv1d(channels, 3 * channels, 1), nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        size = channels // self.heads
        q, k, v = self.mix(x.flatten(2)).reshape(batch * self.heads, 3 * size, height * width).split(size, 1)
        weights = torch.einsum("bct,bcs->bts", q / math.sqrt(size), k).softmax(-1)
        found = torch.einsum("bts,bcs->bct", weights, v).reshape(batch, channels, height * width)
        return x + self.out(found).view_as(x)  # type: ignore[no-any-return]


@model("diffusion", floats(BATCH, 3, 8, 8), floats(BATCH, 3, 8, 8, seed=1), whole(STEPS, BATCH))
class Diffusion(nn.Module):
    """Predicts the noise of a picture at a step of a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.down, self.inner, self.up = Block(3, 8, 16), Block(8, 12, 16), Block(20, 8, 16)
        self.attend, self.head = PixelAttention(12, 2), nn.Conv2d(8, 3, 3, padding=1)
        self.register_buffer("kept", torch.linspace(0.99, 0.9, STEPS).cumprod(0))

    def forward(self, x: Tensor, noise: Tensor, step: Tensor) -> Tensor:
        kept = self.kept.to(x.dtype)[step][:, None, None, None]
        angles = step[:, None] * torch.exp(-math.log(1e4) * torch.arange(4, dtype=x.dtype) / 4)
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        high = self.down(kept.sqrt() * x + (1 - kept).sqrt() * noise, time)
        low = self.attend(self.inner(F.avg_pool2d(high, 2), time))
        return F.mse_loss(self.head(self.up(torch.cat([high, F.interpolate(low, scale_factor=2)], 1), time)), noise)


@model("adversarial", floats(BATCH, 3, 8, 8), floats(BATCH, 6, seed=1))
class Adversarial(nn.Module):
    """A generator and a judge with a loss each; the judge's weights are normed by power iteration."""

    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.spectral_norm
        self.make = nn.Sequential(
            nn.Linear(6, 32), nn.Unflatten(1, (8, 2, 2)), nn.BatchNorm2d(8), nn.ReLU(),
            nn.ConvTranspose2d(8, 6, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(6, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.judge = nn.Sequential(
            normed(nn.Conv2d(3, 8, 4, 2, 1)), nn.LeakyReLU(0.2), nn.Flatten(), normed(nn.Linear(128, 1))
        )

    def forward(self, real: Tensor, latent: Tensor) -> Tensor:
        fake = self.make(latent)
        judged = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(fake.detach())).mean()
        return judged + F.softplus(-self.judge(fake)).mean()


@model("gradient_penalty", floats(BATCH, 10))
class GradientPenalty(nn.Module):
    """The gradient by the input is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Sequential(nn.Linear(10, 16), nn.Softplus(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        judged = self.judge(x)
        (slope,) = torch.autograd.grad(judged.sum(), x, create_graph=True)
        return judged.mean() + (slope.norm(dim=1) - 1).square().mean()


@model("differential_equation", floats(BATCH, 2))
class DifferentialEquation(nn.Module):
    """Second derivatives of every sample, by function transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        second = torch.func.vmap(torch.func.hessian(lambda point: self.layers(point).squeeze(-1)))(x)
        return second.diagonal(dim1=-2, dim2=-1).sum(-1).square().mean()


@model("variational", floats(BATCH, 1, 20))
class Variational(nn.Module):
    """Causal dilated convolutions with normed weights, and distributions that check their arguments."""

    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(normed(nn.Conv1d(8 if i else 1, 8, 3, dilation=2**i)) for i in range(3))
        self.encode, self.decode = nn.Linear(8, 8), nn.Linear(4, 20)

    def forward(self, x: Tensor) -> Tensor:
        found = x
        for i, layer in enumerate(self.layers):
            found = F.elu(layer(F.pad(found, (2 * 2**i, 0))))
        mean, spread = self.encode(found[:, :, -1]).chunk(2, -1)
        posterior = Normal(mean, F.softplus(spread))
        divergence = kl_divergence(posterior, Normal(torch.zeros_like(mean), torch.ones_like(mean)))
        return F.mse_loss(self.decode(posterior.rsample()), x[:, 0]) + divergence.mean()


@model("flow", floats(BATCH, 8))
class Flow(nn.Module):
    """A normalising flow of affine couplings."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        volume = torch.zeros_like(x[:, 0])
        for i, layer in enumerate(self.layers):
            kept, changed = x.roll(4 * (i % 2), 1).chunk(2, 1)
            scale, shift = layer(kept).chunk(2, 1)
            volume = volume + scale.tanh().sum(1)
            x = torch.cat([kept, changed * scale.tanh().exp() + shift], 1)
        return -(Normal(0.0, 1.0).log_prob(x).sum(1) + volume).mean()
