"""Checkpoints on object stores, where nothing is renamed: the manifest, which comes last, is the commit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
import torch
from torch import nn

from autopar import checkpoint
from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.claim import CLAIM
from autopar.runtime.checkpoint.stores import RemoteStore
from tests.helpers.s3_bucket import s3_bucket

from .training import assert_equal, reference, run


@pytest.fixture
def memory() -> Iterator[str]:
    fsspec.filesystem("memory").store.clear()
    yield "memory://bucket/run"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def s3() -> Iterator[str]:
    with s3_bucket() as bucket:
        yield f"{bucket}/run"


def goes_on(url: str) -> None:
    """A training is saved and goes on; the same step twice; one that was not completed; one file changed."""
    made = run(reference())
    made.steps(range(2))
    for _ in range(2):
        path = checkpoint.save(url, made.model, made.optimizer, scheduler=made.scheduler, step=2)
    assert path == f"{url}/step-000002-2", "the first one stayed until this one was complete"
    system, root = fsspec.core.url_to_fs(url)
    assert [name.rsplit("/", 1)[-1] for name in system.ls(root, detail=False)] == [CLAIM, "step-000002-2"]
    again = run(reference())
    found = checkpoint.load(url, again.model, again.optimizer, scheduler=again.scheduler)
    assert found.step == 2
    assert_equal(again.whole(), made.whole())

    def fails(*_: Any) -> Any:
        raise OSError("the connection was lost")

    failing = patch("autopar.runtime.checkpoint.save.index_to_json", fails)
    with failing, pytest.raises(CheckpointError, match="the connection was lost"):
        checkpoint.save(url, made.model, step=3)
    assert checkpoint.load(url, again.model).step == 2
    checkpoint.save(url, made.model, step=3)
    assert checkpoint.load(url, again.model).step == 3
    name = next(n for n in system.ls(f"{root}/step-000003", detail=False) if n.endswith(".safetensors"))
    content = bytearray(system.cat_file(name))
    content[-3] ^= 1
    system.pipe_file(name, bytes(content))
    with pytest.raises(CheckpointError, match=r"000\.safetensors is damaged.*Another complete .*step-000002"):
        checkpoint.load(url, again.model)


def test_in_memory(memory: str) -> None:
    goes_on(memory)


def test_loops_keep_the_newest(memory: str) -> None:
    model = nn.Linear(3, 2)
    with checkpoint.Checkpointer(memory, model, every=1, keep=2) as kept:
        for step in range(1, 5):
            with torch.no_grad():
                model.bias.fill_(step)
            kept.step(step)
    store = RemoteStore(fsspec.filesystem("memory"), "/bucket/run", memory)
    assert store.names() == [CLAIM, "step-000003", "step-000004"]
    checkpoint.save_safetensors(f"{memory}/export", model)
    other = nn.Linear(3, 2)
    checkpoint.load_weights(f"{memory}/export", other)
    assert torch.equal(other.bias, model.bias)


@pytest.mark.slow
def test_on_a_server_of_s3(s3: str) -> None:
    goes_on(s3)
