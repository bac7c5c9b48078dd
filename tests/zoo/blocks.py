"""More plain models: blocks of several fields, and operations whose kernels depend on how operands lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .plain import BATCH, floats, model, whole


@model("reentrant_checkpoint", floats(BATCH, 12))
class ReentrantCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in self.layers:
            x = checkpoint(lambda value, layer=layer: layer(value).tanh(), x, use_reentrant=True)
        return x.square().sum()


@model("linear_algebra", floats(BATCH, 4, 4))
class LinearAlgebra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x)
        gram = y @ y.mT + 4 * torch.eye(4, dtype=x.dtype)
        return (
            torch.linalg.cholesky(gram).sum()
            + torch.linalg.solve(gram, y).sum()
            + torch.linalg.inv(gram).sum()
            + gram.logdet().sum()
        )


@model("fourier", floats(BATCH, 16))
class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)
        self.filter = nn.Parameter(torch.randn(9, 2, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.mix(x)) * torch.view_as_complex(self.filter), n=16).square().mean()


@model("vector_quantised", floats(BATCH, 10))
class VectorQuantised(nn.Module):
    """A variational encoder with a nearest-neighbour codebook and a straight-through estimate."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(10, 8), nn.Linear(4, 10)
        self.codes = nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        nearest = self.codes[(z[:, None] - self.codes[None]).square().sum(-1).argmin(-1)]
        kept = z + (nearest - z).detach()
        return (
            F.mse_loss(self.decode(kept), x)
            + F.mse_loss(nearest, z.detach())
            - 0.5 * (1 + log_variance - mean**2).mean()
        )


@model("recommender", whole(20, BATCH, 3), floats(BATCH, 4), whole(2, BATCH, seed=1))
class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 4, mode="sum") for _ in range(3))
        self.bottom, self.top = nn.Linear(4, 4), nn.Linear(10, 1)

    def forward(self, ids: Tensor, x: Tensor, clicked: Tensor) -> Tensor:
        dense = self.bottom(x).relu()
        vectors = torch.stack([dense, *(table(ids[:, k : k + 1]) for k, table in enumerate(self.tables))], 1)
        first, second = torch.tril_indices(4, 4, -1)
        features = torch.cat([dense, (vectors @ vectors.mT)[:, first, second]], 1)
        return F.binary_cross_entropy_with_logits(self.top(features).squeeze(-1), clicked.to(x.dtype))


@model("graph_attention", floats(5, 4), whole(5, 2, 9))
class GraphAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.score = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(12, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        nodes, (source, target) = self.first(x), (edges[0], edges[1])
        scores = self.score(torch.cat([nodes[source], nodes[target]], -1)).squeeze(-1)
        largest = torch.full((5,), -1e9, dtype=x.dtype).scatter_reduce(0, target, scores, "amax", include_self=True)
        weights = (scores - largest[target]).exp()
        weights = weights / torch.zeros(5, dtype=x.dtype).index_add(0, target, weights)[target]
        found = torch.zeros(5, 6, dtype=x.dtype).index_add(0, target, nodes[source] * weights[:, None])
        return self.second(found).square().mean()


@model("contrastive", whole(9, BATCH, 11), whole(2, BATCH))
class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv, self.head = nn.Embedding(9, 12), nn.Conv1d(12, 8, 3), nn.Linear(8, 7)

    def encode(self, ids: Tensor) -> Tensor:
        return F.normalize(self.head(F.max_pool1d(self.conv(self.embed(ids).mT), 3).mean(-1)), dim=-1)

    def forward(self, ids: Tensor, same: Tensor) -> Tensor:
        a, b = self.encode(ids), self.encode(ids.flip(1))
        similar, target = a @ b.T / 0.1, torch.arange(len(a))
        return (
            F.cross_entropy(similar, target)
            + F.cross_entropy(similar.T, target)
            + F.cosine_embedding_loss(a, b, same * 2 - 1)
        )


@model("chunked_linear_attention", floats(BATCH, 20, 12), floats(BATCH, 0, 12))
class ChunkedLinearAttention(nn.Module):
    """A recurrence over chunks; one input is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.decay = nn.Linear(12, 36), nn.Parameter(torch.linspace(-1, 1, 3))

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        x = torch.cat([past, x], 1)
        q, k, v = self.mix(x).view(x.shape[0], 20, 3, 3, 4).unbind(2)
        state, found = torch.zeros(x.shape[0], 3, 4, 4, dtype=x.dtype), []
        for start in range(0, 20, 5):
            here = slice(start, start + 5)
            found.append(torch.einsum("bshd,bhde->bshe", q[:, here], state))
            state = state * self.decay.sigmoid()[None, :, None, None] + torch.einsum(
                "bshd,bshe->bhde", k[:, here], v[:, here]
            )
        return torch.cat(found, 1).flatten(2).square().mean() + state.sum()


@model("transposed_attention", floats(BATCH, 8, 8))
class TransposedAttention(nn.Module):
    """Attention kernels read rows: what a copy made contiguous must stay so."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.mix(x)[:, None].transpose(-1, -2).contiguous()
        return F.scaled_dot_product_attention(q, q * 2, q * 3).square().mean()


@model("memory_order", floats(BATCH, 8, 8))
class MemoryOrder(nn.Module):
    """Reads memory by strides, of a permuted tensor too; complex views of what was transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x).transpose(0, 1)
        pairs = torch.view_as_complex(y.transpose(1, 2).contiguous().unflatten(-1, (-1, 2)))
        return (
            y.as_strided((3, 4), (8, 2), 1).sum()
            + (y * 1.0).as_strided((5, 4, 2), (7, 3, 1)).square().sum()
            + pairs.abs().mean()
        )
