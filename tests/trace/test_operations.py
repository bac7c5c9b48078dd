"""Operations whose own way to compute a graph cannot hold, or whose values were once others than eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import TraceError
from autopar.runtime.launch import run_local
from autopar.trace.tracer import trace
from tests.helpers.marks import slow_but, slow_rows_but
from tests.op_db.outcome import outcome_of
from tests.op_db.wrapped import OperatorCase

Function = Callable[[torch.Tensor], Any]
LABELS = torch.tensor([[3, 0, -1, 1, 1], [0, 1, 2, -1, -1], [1, -1, 1, 1, 1], [2, 3, 4, 1, 0]])


class Scaled(nn.Module):
    """A function of what is learnt."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.rand(4, 5) + 0.5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x * self.scale)


def _written_in_place(x: torch.Tensor) -> torch.Tensor:
    """Memory of every kind without values, and then with them."""
    strided, permuted = torch.empty_strided((4, 5), (1, 4)), torch.empty_permuted((4, 5), (1, 0))
    like = x.new_empty_strided((4, 5), (1, 4))
    strided.copy_(x)
    like[:] = x.exp()
    return strided.t().reshape(4, 5) + permuted.fill_(3.0) * like


FUNCTIONS: dict[str, Function] = {
    "written in place": _written_in_place,
    "pixel centres": lambda x: x * torch.arange(0.5, 5.5),
    "pixel centres of a batch": lambda x: x.t() * torch.arange(0.5, x.shape[0] + 0.5),
    "fractional steps": lambda x: x * torch.arange(0, 1.25, 0.25),
    "counted in floats": lambda x: x * torch.arange(5.0),
    "labels that end": lambda x: F.multilabel_margin_loss(x, LABELS),
    "cleared copy": lambda x: x + x.clone().zero_(),
    "only a cleared copy": lambda x: x.clone().zero_(),
    "conjugates": lambda x: torch.fft.ifft(torch.fft.fft(x).conj()).real,
    "half a spectrum": lambda x: torch.fft.ihfft(x).abs(),
    "conjugated half": lambda x: torch.fft.ihfft(x).conj(),
    "variance of complex numbers": lambda x: torch.complex(x, x + 1).var(1),
    "nothing to add up": lambda x: x[:, :0].logsumexp(1) + x[:, :0].sum(1),
    "Gaussian": lambda x: F.gaussian_nll_loss(x, x.detach() + 1, x.exp()),
    "rounded": lambda x: (x.to(torch.bfloat16) * 2.7).float() + (x.half() / 3).float(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_eager(name: str) -> None:
    torch.manual_seed(0)
    outcome = outcome_of(OperatorCase(name, Scaled(FUNCTIONS[name]), (torch.randn(4, 5),)), ((2,), (2, 2)))
    assert outcome.kind == "equal", outcome


@pytest.mark.parametrize("kind", slow_but([nn.LSTM], [nn.LSTM, nn.GRU, nn.RNN]))
@pytest.mark.parametrize("options", slow_but([{}], [{}, {"bidirectional": True, "bias": False}]), ids=str)
def test_recurrent_layers_in_single_precision(kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = kind(4, 6, batch_first=True, **options)
    outcome = outcome_of(OperatorCase("layer", layer, (torch.randn(4, 2, 4),)), ((2,),))
    assert outcome.kind == "equal", outcome


def test_recurrent_layers_are_as_before_outside_a_trace() -> None:
    before = torch._C._get_mkldnn_enabled()
    trace(nn.LSTM(4, 6), (torch.randn(2, 4, 4),), device="cpu")
    assert torch._C._get_mkldnn_enabled() == before


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("training", slow_but([True], [True, False]))
def test_dropout_between_recurrent_layers_is_drawn(kind: Any, training: bool) -> None:
    layer = kind(4, 6, num_layers=3, dropout=0.3, bidirectional=True)
    graph = trace(layer, (torch.randn(1, 4, 4),), device="cpu", training=training).graph
    draws = [node for node in graph.nodes if node.op.startswith("autopar.")]
    assert len(draws) == (2 if training else 0)


@pytest.mark.parametrize(("kind", "shape"), slow_rows_but([1], [(nn.GRU, (1, 3, 4)), (nn.LSTM, (4, 1, 4))]))
def test_dropout_between_recurrent_layers_is_as_eager(kind: Any, shape: tuple[int, ...]) -> None:
    """One sample or one step: eager draws here count elements as they lie, a trace counts sample by sample."""
    torch.manual_seed(0)
    layer = kind(4, 6, num_layers=3, dropout=0.3, batch_first=True)
    outcome = outcome_of(OperatorCase("layer", layer, (torch.randn(shape),)), ((2,),))
    assert outcome.kind == "equal", outcome


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_dropout_between_recurrent_layers_trains_alike(kind: Any) -> None:
    torch.manual_seed(0)
    model = Recurrent(kind(6, 8, num_layers=2, dropout=0.3, batch_first=True))
    assert autopar.verify(model, (2,), (torch.randn(4, 3, 6),)).ok


class Recurrent(nn.Module):
    """A loss of what a recurrent layer says."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.out(self.layer(x)[0]).square().mean()
        return loss


def test_memory_without_values_is_zero() -> None:
    def function(x: torch.Tensor) -> Any:
        made = torch.empty_strided((2, 3), (1, 2)), torch.empty_permuted((2, 3), (1, 0))
        return x, *made, x.new_empty_strided((2, 3), (3, 1))

    graph = trace(Scaled(function), (torch.randn(4, 5),), device="cpu").graph
    assert not [node.op for node in graph.nodes if "empty" in node.op]
    assert {node.args[1] for node in graph.nodes if node.op == "aten.full.default"} == {0}


CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
UNLIKE = CAUSAL.clone().index_put_((torch.tensor(0), torch.tensor(1)), torch.tensor(0.0))
PADDED = torch.arange(5)[None] >= torch.tensor([5, 3, 4, 2])[:, None]


class Encoder(nn.Module):
    """An encoder of torch's, with the mask it is given, or the causal one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, padded: torch.Tensor | None = None) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if mask is None else mask
        return self.encoder(x, mask, padded)


class Decoder(nn.Module):
    """A decoder of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.decoder(x, x.tanh(), tgt_mask=mask)


@pytest.mark.parametrize(
    ("kind", "training", "given"),
    [
        pytest.param(Encoder, True, (), marks=pytest.mark.slow),
        pytest.param(Encoder, True, (UNLIKE,), marks=pytest.mark.slow),
        pytest.param(Encoder, False, (CAUSAL,), marks=pytest.mark.slow),
        (Encoder, False, (CAUSAL < 0, PADDED)),
        pytest.param(Decoder, True, (CAUSAL,), marks=pytest.mark.slow),
    ],
)
def test_transformers_of_torch_take_masks(kind: Any, training: bool, given: tuple[torch.Tensor, ...]) -> None:
    torch.manual_seed(0)
    model, x = kind().train(training), torch.randn(4, 5, 8)
    outcome = outcome_of(OperatorCase("masked", model, (x, *given)), ((2,),))
    assert outcome.kind == "equal", outcome
    traced = trace(model, (x, *given), device="cpu")
    assert not [node.op for node in traced.graph.nodes if "transformer" in node.op]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.to_sparse(), r"a tensor is sparse, but graphs know dense tensors only"),
        (lambda x: x.to_sparse().to_dense(), r"(?s)_to_sparse.*in module ''.*sparse_coo; but graphs know dense"),
        (lambda x: x.unique(), r"(?s)_unique2.*shape of a result depends on the values"),
        (lambda x: nn.utils.rnn.pack_padded_sequence(x[None], [4])[0], r"(?s)_pack_padded_sequence.*padded batch"),
    ],
)
def test_what_no_graph_holds_says_so(function: Function, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace(Scaled(function), (torch.randn(4, 5),), device="cpu")


class Odd(nn.Module):
    """A parameter that is a number, and one of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.scale, self.none = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.randn(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).tanh() * (1 + self.scale) + self.none.sum()
        return (self.last(y) * self.scale).square().mean()


def _trained(model: Any, step: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(3):
        losses.append(float(step().detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("options", [{"stages": 2, "microbatches": 2}, {"zero": 3}], ids=str)
def test_numbers_and_empty_parameters_train(options: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, x = Odd(), torch.randn(4, 5)

    def work(rank: int, world: int) -> list[float]:
        parallel = autopar.parallelize(model, (2,), options=autopar.Options(**options))
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.1)
        losses = _trained(parallel, lambda: parallel.step(x), optimizer)
        assert parallel.full_tensor(dict(parallel.named_parameters())["scale"]).shape == ()
        return losses

    found = run_local(work, 2, timeout=120)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(x)
        loss.backward()
        return loss

    expected = _trained(model, step, torch.optim.AdamW(model.parameters(), lr=0.1))
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-5)
