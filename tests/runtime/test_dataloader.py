"""``model.dataloader`` and ``Options(pad_to=)``: batches of one process, whatever the plan and the lengths."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

import autopar
from autopar.errors import InputMismatchError, OptionsError
from autopar.runtime.inputs.sequences import SequencePadding
from tests.helpers.models import Stack, make
from tests.helpers.planning import gradients_of, on, slow_devices

WORDS = 257


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Token sequences of different lengths, none of a multiple of 4."""

    def __init__(self, count: int = 11) -> None:
        source = torch.Generator().manual_seed(3)
        self.texts = [torch.randint(2, WORDS, (3 + (5 * i) % 9,), generator=source) for i in range(count)]
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return {"input_ids": self.texts[index]}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __init__(self, texts: Texts) -> None:
        self.texts = texts

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.texts[index] for index in range(len(self.texts)))


class Encoding(dict[str, torch.Tensor]):
    """As tokenizers give."""


def collate(samples: list[dict[str, torch.Tensor]], masked: bool = True) -> Encoding:
    ids = [sample["input_ids"] for sample in samples]
    mask = pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
    labels = pad_sequence(ids, batch_first=True, padding_value=-100)
    others = {"attention_mask": mask} if masked else {}
    return Encoding(input_ids=pad_sequence(ids, batch_first=True), labels=labels, **others)


def whole(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: getattr(value, "full_tensor", lambda v=value: v)() for key, value in batch.items()}


PLANS: dict[str, dict[str, Any]] = {
    "data": {"zero": 0, "stages": 1},
    "tensor": {"pins": {"model.layers.*.mlp.up_proj.weight": "R,S(0)"}, "mesh_search": False},
    "stages": {"stages": 2, "microbatches": 2},
}


@pytest.mark.parametrize("name", ["small", *(pytest.param(name, marks=pytest.mark.slow) for name in PLANS)])
def test_texts_of_many_lengths_train_as_in_one_process(name: str) -> None:
    """Loss and every gradient; the last batch is smaller; lengths share programs."""
    small = name == "small"

    def work(rank: int, world: int) -> None:
        reference = Stack(layers=1) if small else make("llama")[0]
        options = autopar.Options(**PLANS.get(name, {"stages": 1}), pad_to=16 if small else 8)
        mesh = (2,) if small else (2, 2)
        model = autopar.parallelize(copy.deepcopy(reference), mesh, options=options, cluster=slow_devices())
        texts = Texts()
        gather = partial(collate, masked=not small)
        loader = model.dataloader(texts, 4, collate_fn=gather)
        expected = DataLoader(Texts(), 4, collate_fn=gather)
        assert len(loader) == len(expected) == 3
        for batch, one in zip(loader, expected, strict=True):
            assert batch["input_ids"].shape[1] % 8 == 0
            wanted, gradients = gradients_of(reference, dict(one))
            torch.testing.assert_close(model.step(**batch), wanted, rtol=1e-5, atol=1e-6)
            for path, parameter in model.named_parameters():
                assert parameter.grad is not None
                found = model.full_tensor(parameter.grad)
                torch.testing.assert_close(found, gradients[path], rtol=1e-4, atol=1e-6, msg=lambda m, p=path: p + m)
            model.zero_grad()
        assert len(texts.read) <= 6, "no more than its share"
        assert len({each["input_ids"].shape[1] for each in expected}) == 3
        multiple = 16 if small else 8
        shapes = {(len(each["input_ids"]), -(-each["input_ids"].shape[1] // multiple)) for each in expected}
        assert len(model.programs()) == len(shapes)

    on(2 if small else 4, work)


def test_loaders_give_what_one_process_gets() -> None:
    """Shuffled epochs, a position, streams, any sampler, other batches than mappings, two ranks."""

    def work(rank: int, world: int) -> None:
        model = autopar.parallelize(nn.Linear(2, 2), (world,))
        texts = Texts()
        loader = model.dataloader(texts, 3, collate_fn=collate, shuffle=True, seed=5)
        epochs = [[whole(batch)["input_ids"] for batch in loader] for _ in range(2)]
        assert loader.epoch == 2 and len(epochs[0]) == 4
        assert sorted(len(each) for each in epochs[0]) == [2, 3, 3, 3]
        rows = [sorted(tuple(row[row > 0].tolist()) for batch in epoch for row in batch) for epoch in epochs]
        assert rows[0] == rows[1] == sorted(tuple(text.tolist()) for text in texts.texts)
        assert not torch.equal(epochs[0][0], epochs[1][0])
        assert len(texts.read) == (14 if rank == 0 else 8), "each sample is read once"

        again = model.dataloader(Texts(), 3, collate_fn=collate, shuffle=True)
        for index, _ in enumerate(loader):
            if index == 1:
                break
        again.load_state_dict(loader.state_dict())
        third = [whole(batch)["input_ids"] for batch in again]
        loader.set_epoch(1)
        loader.set_epoch(2)
        everything = [whole(batch)["input_ids"] for batch in loader]
        assert [each.tolist() for each in third] == [each.tolist() for each in everything[2:]]
        assert again.state_dict() == {"epoch": 3, "seed": 5, "batches": 0}

        stream = model.dataloader(Stream(Texts()), 3, collate_fn=collate)
        stream.load_state_dict({"epoch": 0, "batches": 1})
        plain = [dict(each) for each in DataLoader(Texts(), 3, collate_fn=collate)]
        for found, wanted in zip(stream, plain[1:], strict=True):
            for key, value in whole(found).items():
                assert torch.equal(value, wanted[key]), key
        assert stream.epoch == 1

        pairs = TensorDataset(torch.arange(10.0).reshape(5, 2), torch.arange(5))
        drawn = model.dataloader(pairs, batch_sampler=BatchSampler(RandomSampler(pairs), 3, True))
        torch.manual_seed(rank)  # The first rank's generator counts.
        ((x, y),) = drawn
        assert torch.equal(x.full_tensor()[:, 0], 2.0 * y.full_tensor())
        calls: list[str] = []
        model._watch.call = lambda name: nullcontext(calls.append(name))
        (single,) = model.dataloader([torch.tensor(1.0), torch.tensor(2.0)], 2)
        assert calls == ["model.dataloader()"] * 2, "what is exchanged first is watched too"
        assert single.full_tensor().tolist() == [1.0, 2.0]
        with pytest.raises(InputMismatchError, match="other samples"):
            next(iter(model.dataloader(range(8 - rank), 4, sampler=range(8 - rank)[::-1])))
        for wrong in ({"shuffle": True}, {"num_workers": 2}, {"persistent_workers": True, "num_workers": 1}):
            with pytest.raises(OptionsError):
                model.dataloader(Stream(Texts()), 3, **wrong)
        with pytest.raises(OptionsError, match="global batch"):
            model.dataloader(Texts())

    on(2, work)


@pytest.mark.slow
def test_what_is_added_is_ignored() -> None:
    """Each kind of model in one process: the same loss from a longer batch, and the same outputs at real positions."""
    ids = torch.randint(2, WORDS, (4, 13), generator=torch.Generator().manual_seed(0))
    for name in ("llama", "gpt2", "bert"):
        reference = make(name, layers=1)[0]
        wanted = reference(input_ids=ids, labels=ids)
        model = autopar.parallelize(copy.deepcopy(reference), (1,), options=autopar.Options(pad_to=8))
        longer = model.padded(input_ids=ids, labels=ids)
        assert longer["labels"].shape == longer["attention_mask"].shape == (4, 16)
        with torch.no_grad():
            found = reference(**longer)
        torch.testing.assert_close(found.loss, wanted.loss.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.logits[:, :13], wanted.logits.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.step(input_ids=ids, labels=ids), wanted.loss.detach(), rtol=1e-5, atol=1e-6)
    options = autopar.Options(pad_to=8)
    plan = autopar.plan(reference, (1,), {"input_ids": ids, "labels": ids}, options=options)
    planned = autopar.parallelize(copy.deepcopy(reference), (1,), plan=plan, options=options)
    planned.step(input_ids=ids, labels=ids)
    assert planned.plan == plan
    positional = model.step(ids, labels=ids)  # A mask is added as a keyword.
    torch.testing.assert_close(positional, wanted.loss.detach(), rtol=1e-5, atol=1e-6)
    for options in ({"shuffle": True, "sampler": [0]}, {"batch_sampler": [[0]], "batch_size": 2}):
        with pytest.raises(OptionsError, match=r"exclude each other|leave out batch_size"):
            model.dataloader([(row,) for row in ids], **{"batch_size": 2, **options})  # type: ignore[arg-type]
    none = model.step(ids, None, labels=ids)  # No mask is a mask of all positions.
    torch.testing.assert_close(none, wanted.loss.detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(OptionsError, match="ids of padding"):
        model.padded(input_ids=ids.clone().fill_(0), labels=ids)
    with pytest.raises(OptionsError, match="have the collate function give a dict"):
        next(iter(model.dataloader([(row,) for row in ids], batch_size=4)))


def test_what_is_no_sequence_stays() -> None:
    padding = SequencePadding(8, token=7, takes_mask=True, causal=False)
    names = ["input_ids", "labels", "pixel_values", "batch['token_type_ids']"]
    leaves = [
        torch.ones(2, 5, dtype=torch.long),
        torch.ones(2, 3, dtype=torch.long),
        torch.ones(2, 5),
        torch.ones(2, 5).long(),
    ]
    widths = padding.plan([padding.record(names, leaves)])
    ids, labels, pixels, types = (widths.apply(name, leaf) for name, leaf in zip(names, leaves, strict=True))
    assert ids.tolist() == [[1] * 5 + [7] * 3] * 2
    assert labels is leaves[1] and pixels is leaves[2], "a label for each class is no sequence"
    assert types.shape == (2, 8)
    assert widths.wants_mask(names, leaves)
    assert widths.wants_mask([*names, "attention_mask"], [*leaves, None])
    with pytest.raises(OptionsError, match="attention_mask"):
        widths.wants_mask([*names, "position_ids"], [*leaves, leaves[0]])
    reserving = replace(padding, reserved=True)
    unclear = [reserving.record(names, [leaves[0] * value, *leaves[1:]]) for value in (7, 1)]
    with pytest.raises(OptionsError, match="ids of padding"):  # On every rank.
        reserving.plan(unclear).wants_mask(names, leaves)
    assert replace(reserving, causal=True).plan(unclear).wants_mask(names, leaves)
    left = torch.tensor([[0, 1, 1], [1, 1, 1]])
    records = [padding.record(["attention_mask"], [mask]) for mask in (left, torch.ones(2, 5))]
    assert padding.plan(records).apply("attention_mask", left).tolist()[0] == [0, 0, 0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"shuffle": "yes"}, "shuffle='yes' is not True or False"),
        ({"drop_last": None}, "drop_last=None is not True or False"),
        ({"seed": "a"}, "seed='a' is not a whole number"),
        ({"collate_fn": 3}, "collate_fn=3 is not a function"),
        ({"num_workers": "2"}, "num_workers='2' is not a number of processes"),
        ({"sampler": 3}, "sampler=3 cannot be iterated over: it gives indices"),
        ({"batch_sampler": 3}, "batch_sampler=3 cannot be iterated over: it gives lists"),
        ({"batchsize": 3}, r"no argument 'batchsize': did you mean batch_size=\?"),
        ({"num_worker": 3}, r"no argument 'num_worker': did you mean num_workers=\?"),
        ({"dataset": DataLoader(Texts())}, r"the dataset is a DataLoader, .* give what it reads, loader.dataset"),
        ({"dataset": Texts}, "the dataset is the class Texts: give one with __len__"),
        ({"dataset": 3}, "the dataset is 3: give one with __len__"),
        ({"dataset": iter([1])}, r"a list_iterator, which can be iterated over but not indexed: .*IterableDataset"),
    ],
)
def test_arguments_of_another_kind(given: dict[str, Any], words: str) -> None:
    model = autopar.parallelize(nn.Linear(2, 2), (1,))
    with pytest.raises(OptionsError, match=words):
        model.dataloader(**{"dataset": Texts(), "batch_size": 4, **given})
