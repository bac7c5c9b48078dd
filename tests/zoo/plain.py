"""Plain torch models that each exercise something awkward, with sizes that divide nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Batch = tuple[Any, ...] | dict[str, Any]
Maker = Callable[[], tuple[nn.Module, Batch]]
MODELS: dict[str, Maker] = {}
BATCH = 6


def model(name: str, *inputs: Callable[[], Tensor]) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Registers a module class, made without arguments, with the makers of its positional inputs."""

    def register(kind: type[nn.Module]) -> type[nn.Module]:
        MODELS[name] = lambda: (kind(), tuple(make() for make in inputs))
        return kind

    return register


def floats(*shape: int, seed: int = 0) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(high: int, *shape: int, seed: int = 0) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


@model("encoder_decoder", floats(BATCH, 7, 24), floats(BATCH, 5, 24, seed=1))
class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Transformer(24, 3, 1, 1, 40, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        return (self.core(source, target, tgt_mask=mask, tgt_is_causal=True) - target).pow(2).mean()


@model("sequence_first", floats(7, BATCH, 24), floats(5, BATCH, 24, seed=1))
class SequenceFirst(nn.Module):
    """The batch is dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Transformer(24, 3, 1, 1, 40, dropout=0.0, norm_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return (self.core(source, target) - target).abs().mean()


@model("lstm", whole(37, BATCH, 5), whole(37, BATCH, 5, seed=1))
class LanguageLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.core = nn.Embedding(37, 14), nn.LSTM(14, 18, num_layers=2, batch_first=True)
        self.head = nn.Linear(18, 37)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.core(self.embed(ids))[0]).transpose(1, 2), labels)


@model("gru", floats(BATCH, 5, 10))
class BidirectionalGru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.GRU(10, 9, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output, last = self.core(x)
        return output.square().mean() + last.sum()


@model("unet", floats(BATCH, 3, 16, 16), whole(4, BATCH, 16, 16))
class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(12, 20, 3, stride=2, padding=1), nn.GroupNorm(5, 20), nn.SiLU())
        self.up = nn.ConvTranspose2d(20, 12, 2, stride=2)
        self.head = nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        skip = self.down(x)
        low = self.middle(F.max_pool2d(skip, 2))
        low = F.interpolate(low, scale_factor=2.0, mode="bilinear", align_corners=False)
        return F.cross_entropy(self.head(torch.cat([skip, self.up(low)], 1)), labels)


@model("group_norm", floats(BATCH, 3, 9, 9))
class GroupNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.GELU(), nn.AvgPool2d(2),
            nn.Conv2d(12, 12, 3, groups=12),
            nn.InstanceNorm2d(12, affine=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.layers(x)).mean()


@model("cumulative_batch_norm", floats(BATCH, 5, 9))
class CumulativeBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(5, 8, 3), nn.BatchNorm1d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).tanh().sum()


@model("embedding_bag", whole(31, BATCH, 4), whole(3, BATCH, seed=1))
class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.total = nn.EmbeddingBag(31, 10, mode="mean"), nn.EmbeddingBag(31, 10, mode="sum")
        self.head = nn.Linear(20, 3)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.cat([self.bag(ids), self.total(ids)], -1)), labels)


@model("returns_tuple", floats(BATCH, 10))
class ReturnsTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 14), nn.Linear(14, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        hidden = self.first(x).relu()
        out = self.second(hidden)
        return out.square().mean(), {"hidden": hidden.detach(), "nothing": None, "list": [out.argmax(-1), 3]}


@dataclass
class Result:
    loss: Tensor
    logits: Tensor


@model("returns_dataclass", floats(BATCH, 10))
class ReturnsDataclass(ReturnsTuple):
    def forward(self, x: Tensor) -> Result:  # type: ignore[override]
        out = self.second(self.first(x).relu())
        return Result(out.square().mean(), out)


class Nested(ReturnsTuple):
    def forward(self, batch: dict[str, Any], *, scale: float) -> Tensor:  # type: ignore[override]
        first, (second, third) = batch["first"], batch["rest"]
        return (self.second(self.first(first + second)) * scale - third[:, :6]).square().mean()


def _nested() -> tuple[nn.Module, Batch]:
    shape = (BATCH, 10)
    rest = [floats(*shape, seed=1)(), floats(*shape, seed=2)()]
    return Nested(), {"batch": {"first": floats(*shape)(), "rest": rest}, "scale": 2.5}


MODELS["nested_inputs"] = _nested


@model("step_counter", floats(BATCH, 10))
class StepCounter(nn.Module):
    """Buffers changed in forward, a frozen and an unused parameter, a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(10, 10), nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 10), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("average", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.frozen
        self.steps += 1
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return ((y - self.average) * self.scale).square().mean() + self.scale


@model("tied", whole(19, BATCH, 5))
class Tied(nn.Module):
    """One weight in two modules, transposed; one module called twice; one tensor twice in an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(19, 12), nn.Linear(12, 12), nn.Linear(12, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.middle(self.middle(x).tanh())
        x = x * x + torch.einsum("bsd,btd->bst", x, x).softmax(-1) @ x
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(1, 1).flatten())


@model("one_dimensional", floats(13), floats(13, seed=1))
class OneDimensional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.linspace(-1, 1, 13)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (torch.dot(x, self.weight) + self.bias - y.sum()) ** 2 + torch.outer(x, self.weight).sigmoid().mean()


@model("conv1d_transposed", floats(BATCH, 5, 11))
class Vocoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.mix = nn.ConvTranspose1d(5, 6, 4, stride=2, padding=1), nn.Conv1d(6, 6, 3, dilation=2, padding=2)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.up(x), 0.1)
        y = y + self.mix(y)
        return F.glu(self.norm(F.pad(y, (3, 1), mode="reflect")), 1).abs().mean()


@model("indexing", floats(BATCH, 7, 8), whole(7, BATCH, 3), whole(8, 7, seed=2))
class Indexing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = (
            nn.Linear(8, 8),
            nn.Parameter(torch.randn(7, 8, generator=torch.Generator().manual_seed(5))),
        )

    def forward(self, x: Tensor, picks: Tensor, columns: Tensor) -> Tensor:
        y = self.layer(x) + self.table
        gathered = y.gather(1, picks[..., None].expand(-1, -1, 8))
        rows = y[torch.arange(y.shape[0])[:, None], picks]
        spread = torch.zeros_like(y).scatter_add(1, picks[..., None].expand(-1, -1, 8), gathered.tanh())
        put = y.clone()
        put[:, 1:4] = put[:, 1:4] * 2
        put[:, :, 0] = 1.0
        flipped, selected = y.flip(1), y.index_select(1, picks[0])
        chosen = self.table[torch.arange(7), columns].sum()
        window = y.unfold(1, 3, 2).sum(-1)
        masked = y.masked_fill(x > 0.5, -1.0)
        parts = (
            gathered * rows,
            spread,
            put,
            flipped * y,
            selected,
            window,
            masked,
            y[..., ::3],
            y[:, -1],
            torch.stack([y, x]).prod(0),
        )
        return sum((part.square().mean() for part in parts), chosen)


@model("ordering", floats(BATCH, 9))
class Ordering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        best, where = y.topk(3, -1)
        parts = (
            y.cumsum(1), y.sort(1, descending=True)[0] * torch.arange(12), best, y.max(1)[0], y.cumprod(0),
            y.median(1)[0],
            y.logcumsumexp(1), y.min(), y.amax(0), y.argsort(1) * y, F.one_hot(where, 12) * y[:, None], y.norm(dim=0),
            y.std(), y.var(0),
            y.logsumexp(0), y.tril(), y.diagonal(), y.roll(2, 1), y.repeat(2, 3), y.repeat_interleave(2, 0),
            y.clamp(-0.5, 0.5), y.kthvalue(2)[0],
        )  # fmt: skip
        return sum((part.square().mean() for part in parts), torch.zeros(()))


@model("einsums", floats(BATCH, 5, 8), floats(BATCH, 4, 8, seed=1))
class Einsums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(3)
        self.a = nn.Parameter(torch.randn(8, 3, 4, generator=random))
        self.b, self.pair = nn.Parameter(torch.randn(3, 4, 8, generator=random)), nn.Bilinear(8, 8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k = torch.einsum("bsd,dhk->bhsk", x, self.a), torch.einsum("btd,dhk->bhtk", y, self.a)
        z = torch.einsum("bhst,bhtk,hkd->bsd", (q @ k.mT).softmax(-1), k, self.b)
        return (
            self.pair(z[:, :4], y).sigmoid().mean()
            + torch.einsum("bsd,bsd->", x, z)
            + F.cosine_similarity(z[:, 0], y[:, 0]).mean()
        )


@model("checkpointed", floats(BATCH, 12))
class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda value, layer=layer: layer(value).tanh(), x, use_reentrant=False)
        return x.square().sum()


@model("complex_rotary", floats(BATCH, 6, 3, 8))
class ComplexRotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(6.0), 10.0 ** -torch.arange(4.0))
        self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.view_as_complex(self.mix(x).unflatten(-1, (4, 2)))
        return torch.view_as_real(y * self.turn[:, None]).flatten(-2).tanh().square().mean()


@model("sizes_in_arithmetic", floats(BATCH, 6, 8))
class SizesInArithmetic(nn.Module):
    """Python numbers from the batch size, as ``len(x)`` and in loops."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x).reshape(len(x) * 2, -1) / x.shape[0]
        return sum((row.square().sum() for row in y), torch.zeros(()))


@model("losses", floats(BATCH, 8), whole(8, BATCH), floats(BATCH, 8, seed=1))
class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.register_buffer("weight", torch.linspace(0.1, 1, 8))

    def forward(self, x: Tensor, kind: Tensor, target: Tensor) -> Tensor:
        y = self.mix(x)
        return (
            F.cross_entropy(y, kind, weight=self.weight, label_smoothing=0.1)
            + F.kl_div(y.log_softmax(-1), target.softmax(-1), reduction="batchmean")
            + F.binary_cross_entropy_with_logits(y, target.sigmoid()) + F.smooth_l1_loss(y, target)
            + F.huber_loss(y, target) + F.cross_entropy(y, target.softmax(-1)) + F.mse_loss(y.sigmoid(), target)
            + F.multi_margin_loss(y, kind)
            + F.nll_loss(y.log_softmax(-1), kind, reduction="sum") + F.triplet_margin_loss(y, target, x)
        )  # fmt: skip


@model("attention_variants", floats(BATCH, 7, 24))
class AttentionVariants(nn.Module):
    """Multi-head attention with weights returned, a padding mask, a float mask, grouped heads, local scale."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.mix = nn.MultiheadAttention(24, 3, batch_first=True), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(7)[None] >= torch.tensor([7, 5, 3, 7, 6, 2])[:, None]
        y, weights = self.core(x, x, x, key_padding_mask=padding)
        heads = self.mix(y).unflatten(-1, (6, 4)).transpose(1, 2)
        bias = torch.linspace(-1, 1, 49, dtype=x.dtype).view(7, 7)
        z = F.scaled_dot_product_attention(
            heads, heads[:, :2], heads[:, 2:4], attn_mask=bias, scale=0.3, enable_gqa=True
        )
        return z.square().mean() + weights.amax(-1).sum()


@model("random", floats(BATCH, 10))
class Random(nn.Module):
    """Dropout and noise: all ranks draw what one device would."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(10, 14), nn.Linear(14, 6), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.first(x + 0.1 * torch.randn_like(x)).relu())
        out = F.dropout2d(self.second(hidden)[..., None, None], 0.2)[..., 0, 0] * torch.rand(6)
        return (out + F.gumbel_softmax(out)).square().mean() + torch.bernoulli(out.sigmoid()).mean()
