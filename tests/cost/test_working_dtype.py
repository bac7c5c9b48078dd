"""The dtype by which MFU counts."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar import Layout, Options
from autopar.cost import products_dtype
from autopar.ir.node import TensorType

BF16, F32 = torch.bfloat16, torch.float32


def test_the_dtype_of_most_multiplications() -> None:
    wide = TensorType((8, 1024), F32), TensorType((1024, 8), F32)
    deep = TensorType((512, 64), BF16), TensorType((64, 512), BF16)
    small, large = TensorType((8, 8), F32), TensorType((512, 512), BF16)
    sums = ("aten.add.Tensor", (TensorType((1 << 20,), F32),) * 2, TensorType((1 << 20,), F32))
    assert products_dtype([sums]) is None
    assert products_dtype([sums, ("aten.mm.default", wide, small), ("aten.mm.default", deep, large)]) == BF16
    assert products_dtype([("aten.mm.default", wide, small)]) == F32


def test_an_operand_that_is_listed_once_may_be_both() -> None:
    square = TensorType((64, 64), BF16)
    assert products_dtype([("aten.mm.default", (square,), square)]) == BF16


@pytest.mark.parametrize("stages", [1, 2])
def test_a_large_tied_table_in_fp32_does_not_decide(stages: int) -> None:
    found = []
    for tied in (True, False):
        config = GPT2Config(
            vocab_size=5000, n_embd=64, n_head=4, n_layer=2, tie_word_embeddings=tied, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        with torch.device("meta"):
            model, ids = GPT2LMHeadModel(config), torch.empty((8, 64), dtype=torch.int64)
        batch, options = {"input_ids": ids, "labels": ids}, Options(precision="bf16", stages=stages)
        plan = autopar.plan(model, (2,), batch, cluster="dgx-a100-80gb", options=options)
        priced = autopar.price(model, batch, "dgx-a100-80gb", layout=Layout(data=2))
        found.append(plan.predicted.mfu)
        rate = priced.flops_per_second / priced.predicted.mfu
        assert rate == pytest.approx(autopar.Cluster.get("dgx-a100-80gb").device.flops(BF16))
    assert found[0] == pytest.approx(found[1], rel=0.1)
