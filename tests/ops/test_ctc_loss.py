"""The loss of connectionist temporal classification: lengths are values of tensors, targets padded or one after the
other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.check import check_assignments, check_plans, make_case

LABELS, FRAMES = 5, 17


class Padded(nn.Module):
    """Two losses, one with sequences too short for their labels."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(9, 11)

    def scores(self, x: Tensor) -> Tensor:
        return self.score(x).log_softmax(-1).transpose(0, 1)

    def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        scores = self.scores(x)
        short = nn.CTCLoss(reduction="sum", zero_infinity=True)(scores, labels, lengths - 1, lengths)
        return F.ctc_loss(scores, labels, torch.full_like(lengths, FRAMES), lengths) + short


class Selected(Padded):
    """As in transformers: the labels a mask selects, in one dim."""

    def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(LABELS) < lengths[:, None]
        frames = torch.full_like(lengths, FRAMES)
        return F.ctc_loss(self.scores(x), labels.masked_select(mask), frames, mask.sum(-1), reduction="none").sum()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, FRAMES, 9, generator=generator)
    return x, torch.randint(1, 11, (6, LABELS), generator=generator), torch.tensor([5, 3, 1, 4, 1, 5])


@pytest.mark.parametrize("kind", [Padded, Selected])
def test_any_assignment_is_the_eager_model(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    case = make_case(kind(), batch())
    for mesh in ((4,), (2, 2)):
        check_assignments(case, mesh, range(2))


def test_sequences_are_divided() -> None:
    torch.manual_seed(0)
    case = make_case(Selected(), batch())
    chosen = check_plans(case, (3,))["both"].strategies
    (loss,) = (node.name for node in case.graph if node.op == "autopar.ctc_loss.default")
    assert str(chosen[loss]) == "(S(1)) (S(0)) (S(0)) (S(0)) -> (S(0)) (S(1))"


def test_one_sequence_alone_and_labels_one_after_the_other() -> None:
    class Alone(Padded):
        def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
            alone = F.ctc_loss(self.scores(x[:1])[:, 0], labels[0], lengths[0] + 9, lengths[0])
            return alone + F.ctc_loss(self.scores(x), labels.flatten(), lengths + 9, torch.full_like(lengths, LABELS))

    make_case(Alone(), batch())
