"""Steps in microbatches over pipeline stages, on processes, against the plain model."""

from __future__ import annotations

import copy
import itertools
import math
import os
import signal
import time
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map

from autopar.arguments import split_batch
from autopar.errors import WorkerError
from autopar.runtime import ParallelModule, Request, run_local
from autopar.runtime.pipeline.chunk_executable import ChunkExecutable
from autopar.runtime.state.materialise import materialise
from autopar.trace.tracer import Traced
from tests.helpers.marks import slow_but
from tests.helpers.pipelines import (
    SCHEDULE_NAMES,
    PipelineCompiler,
    Ready,
    Wanted,
    cut_for_all,
    traced_for,
    training_step,
)
from tests.passes.test_cut import _make

transformers.logging.set_verbosity_error()
Work = Callable[[ParallelModule, nn.Module, Any], Any]
TOLERANCE = 1e-5


@lru_cache(maxsize=8)
def _traced(name: str) -> tuple[Request, Traced]:
    model, batch = _make(name)
    request = training_step(batch)
    return request, traced_for(model.train(), request)


@lru_cache(maxsize=8)
def _ready(name: str, wanted: Wanted) -> Ready:
    """The first step of every rank, before these are forked."""
    request, traced = _traced(name)
    return Ready(request, cut_for_all(traced, wanted, request))


def on_ranks(name: str, wanted: Wanted, work: Work, *, timeout: float = 200.0) -> list[Any]:
    """``work(model, reference, batch)`` on every rank; only rank 0 starts with the reference's weights."""
    model, batch = _make(name)
    model = model.train()
    ready = _ready(name, wanted)

    def rank_work(rank: int, world: int) -> Any:
        warnings.simplefilter("error")
        plain = copy.deepcopy(model)
        if rank:
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.zero_()
        mesh = init_device_mesh("cpu", wanted.meshes.whole)
        compiler = PipelineCompiler(plain, wanted, rank, ready)
        return work(ParallelModule(plain, mesh, compiler), copy.deepcopy(model), batch)

    return run_local(rank_work, wanted.meshes.devices, timeout=timeout, backend="gloo")


def loss_of(output: Any) -> torch.Tensor:
    found = output if isinstance(output, torch.Tensor) else output.loss
    assert isinstance(found, torch.Tensor)
    return found


def reference_step(reference: nn.Module, batch: Any) -> torch.Tensor:
    args, kwargs = split_batch(batch)
    loss = loss_of(reference(*args, **kwargs))
    loss.backward()
    return loss.detach()


def step(model: ParallelModule, batch: Any) -> torch.Tensor:
    args, kwargs = split_batch(batch)
    return model.step(*args, **kwargs)


def check_equal(found: torch.Tensor, wanted: torch.Tensor, name: str, tolerance: float = TOLERANCE) -> None:
    assert found.shape == wanted.shape, name
    error = float((found.double() - wanted.double()).abs().max()) / max(float(wanted.double().abs().max()), 1e-3)
    assert error <= tolerance, f"{name}: {error}"


def check_gradients(model: ParallelModule, reference: nn.Module, tolerance: float = TOLERANCE) -> None:
    wanted = dict(reference.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in found.items():
        assert (parameter.grad is None) == (wanted[name].grad is None), name
        if parameter.grad is not None:
            check_equal(model.full_tensor(parameter.grad), wanted[name].grad, name, tolerance)


def one_step(model: ParallelModule, reference: nn.Module, batch: Any) -> None:
    wanted = reference_step(reference, batch)
    check_equal(step(model, batch), wanted, "loss")
    check_gradients(model, reference)
    for name, buffer in reference.named_buffers():
        check_equal(model.get_buffer(name), buffer, name)


QUICK = [
    ("gpt2", Wanted((1, 2), "1f1b", 8)),
    ("unet", Wanted((3, 1), "zb-h1", 4)),
    # Rows of a microbatch on three devices: two, two and one of five.
    ("gpt2", Wanted((2, 1), "1f1b", 8, unequal=((1,), (3,)))),
]
MODELS = ("gpt2", "llama", "t5", "unet", "vit")
REST = [
    ("gpt2", Wanted((4, 1), "1f1b", 5)),
    ("llama", Wanted((2, 2), "gpipe", 2)),
    ("t5", Wanted((2, 2), "zb-v", 5)),
    ("llama", Wanted((2, 1), "gpipe", 4, unequal=((1,), (2,)), seed=1)),
    ("gpt2", Wanted((2, 1, 1), "interleaved", 4, unequal=((2, 1), (2, 2)), seed=2)),
    ("t5", Wanted((2, 1), "zb-v", 5, unequal=((3,), (1,)), seed=3)),
    ("vit", Wanted((3, 1), "zb-h1", 4, unequal=((1,), (2,), (1,)), seed=4)),
] + [
    (name, Wanted(mesh, schedule, count, seed=seed))
    for seed, (name, mesh) in enumerate(itertools.product(MODELS, [(4, 1), (2, 2), (3, 1), (2, 2, 2)]))
    for schedule, count in zip(SCHEDULE_NAMES, (1, 2, 5, 8, 5), strict=True)
]


@pytest.mark.parametrize(
    ("name", "wanted"), [*QUICK, *(pytest.param(*r, marks=pytest.mark.slow) for r in REST)], ids=str
)
def test_loss_and_gradients_are_those_of_one_process(name: str, wanted: Wanted) -> None:
    on_ranks(name, wanted, one_step)


def trains(model: ParallelModule, reference: nn.Module, batch: Any) -> list[str]:
    """Optimizers of both kinds, clipping, another batch size, evaluation, gradients added up, names and state."""
    ours = model.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(reference.named_parameters(), lr=0.1, momentum=0.9)
    half = tree_map(lambda t: t[:20], batch)
    for turn, given in enumerate((batch, half, batch)):
        check_equal(step(model, given), reference_step(reference, given), f"loss {turn}", 1e-4)
        norm = model.clip_grad_norm_(0.5, [2.0, math.inf, 1.0][turn])
        check_equal(
            norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5, [2.0, math.inf, 1.0][turn]), "norm"
        )
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert model.state_dict().keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        check_equal(model.full_tensor(model.state_dict()[name]), value, name, 1e-4)
    one_step_more(model, reference, batch)
    evaluates(model, reference, batch)
    return list(model.state_dict())


def one_step_more(model: ParallelModule, reference: nn.Module, batch: Any) -> None:
    """Gradients of two steps add up."""
    model.load_state_dict(reference.state_dict())
    for _ in range(2):
        step(model, batch)
        reference_step(reference, batch)
    check_gradients(model, reference)


def evaluates(model: ParallelModule, reference: nn.Module, batch: Any) -> None:
    args, kwargs = split_batch(batch)
    model.eval()
    reference.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model returns past_key_values")
        found, wanted = model(*args, **kwargs), reference(*args, **kwargs)
    check_equal(found.loss, wanted.loss, "loss")
    check_equal(found.logits, wanted.logits, "logits", 1e-4)
    model.train()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        pytest.param("gpt2", Wanted((2, 2), "1f1b", 4), marks=pytest.mark.slow),
        pytest.param("gpt2", Wanted((1, 2), "gpipe", 2), marks=pytest.mark.slow),
        pytest.param("gpt2", Wanted((2, 1), "1f1b", 4, unequal=((1,), (3,))), marks=pytest.mark.slow),
    ],
)
def test_training_and_evaluation(name: str, wanted: Wanted) -> None:
    names = on_ranks(name, wanted, trains)
    assert all(one == names[0] for one in names)


def takes_parts(model: ParallelModule, reference: nn.Module, batch: Any) -> tuple[float, float]:
    whole = model.step(**batch)
    return float(whole), float(model.step(**model.local_batch(**batch)))


def clips(model: ParallelModule, reference: nn.Module, batch: Any) -> None:
    """torch's own functions on gradients of several stages, with lists and one by one."""
    ours, theirs = list(model.parameters()), list(reference.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    for norm_type, foreach in ((2.0, None), (math.inf, None), (1.0, False), (0.0, None)):
        optimizer.zero_grad()
        other.zero_grad()
        step(model, batch)
        reference_step(reference, batch)
        wanted = torch.nn.utils.clip_grad_norm_(theirs, 0.3, norm_type, foreach=foreach)
        found = torch.nn.utils.clip_grad_norm_(ours, 0.3, norm_type, foreach=foreach)
        assert type(found) is torch.Tensor
        check_equal(found, wanted, f"norm {norm_type}", 1e-3 if norm_type == 0.0 else 1e-4)
        check_gradients(model, reference, 1e-4)
        optimizer.step()
        other.step()
    total = torch.nn.utils.get_total_norm([p.grad for p in ours if p.grad is not None])
    check_equal(total, torch.nn.utils.get_total_norm([p.grad for p in theirs if p.grad is not None]), "total", 1e-4)
    torch.nn.utils.clip_grad_value_(ours, 1e-4)
    torch.nn.utils.clip_grad_value_(theirs, 1e-4)
    check_gradients(model, reference, 1e-4)
    for mine, its in zip(ours, theirs, strict=True):
        if its.grad is not None:
            check_equal(mine.grad.norm(), its.grad.norm(), "norm of one", 1e-4)  # type: ignore[union-attr]
            check_equal(mine.grad.full_tensor(), its.grad, "gradient", 1e-4)  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("unequal", [(), ((1,), (3,))], ids=str)
def test_torchs_own_clipping_over_stages(unequal: tuple[tuple[int, ...], ...]) -> None:
    on_ranks("gpt2", Wanted((2, 1 if unequal else 2), "1f1b", 2, unequal=unequal), clips)


def test_a_local_batch_is_the_batch() -> None:
    for whole, parts in on_ranks("llama", Wanted((2, 1), "1f1b", 2), takes_parts):
        assert parts == whole


def records(model: ParallelModule, reference: nn.Module, batch: Any) -> Any:
    step(model, batch)
    with model.record_timeline() as timelines:
        step(model, batch)
    step(model, batch)
    return timelines


@pytest.mark.parametrize("unequal", slow_but([()], [(), ((1,), (2,), (1,))]), ids=str)
def test_a_measured_timeline(unequal: tuple[tuple[int, ...], ...]) -> None:
    """Every computation of every stage once, one after the other, and none before what it needs."""
    wanted = Wanted((3, 1), "1f1b", 4, unequal=unequal)
    for (timeline,) in on_ranks("gpt2", wanted, records):
        assert timeline.stages == 3
        for rank in range(3):
            ran = [span for span in timeline.spans if span.rank == rank and span.lane == "compute"]
            assert len(ran) == 2 * wanted.microbatches
            assert all(a.end <= b.start for a, b in itertools.pairwise(ran))
        ends = {span.name: span.end for span in timeline.spans}
        starts = {span.name: span.start for span in timeline.spans}
        for k in range(wanted.microbatches):
            assert starts[f"F1.{k}"] >= ends[f"F0.{k}"]
            assert starts[f"B1.{k}"] >= ends[f"B2.{k}"]
        assert 0 < timeline.idle_fraction < 1
        events = timeline.to_chrome_trace()["traceEvents"]
        assert sum(event["ph"] == "X" for event in events) == len(timeline.spans)


def test_checkpoints_of_a_pipeline_load_into_another(tmp_path: Path) -> None:
    """Saved by one division into stages, loaded by another, and by the plain model."""

    def saves(model: ParallelModule, reference: nn.Module, batch: Any) -> None:
        step(model, batch)
        checkpoint.save(model.state_dict(), checkpoint_id=tmp_path)

    def loads(model: ParallelModule, reference: nn.Module, batch: Any) -> None:
        step(model, batch)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        state = model.state_dict()
        checkpoint.load(state, checkpoint_id=tmp_path)
        for name, value in reference.state_dict().items():
            assert torch.equal(model.full_tensor(state[name]), value), name

    on_ranks("gpt2", Wanted((2, 2), "1f1b", 2), saves)
    on_ranks("gpt2", Wanted((2, 1), "gpipe", 2, unequal=((3,), (1,))), loads)
    model, _ = _make("gpt2")
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Without processes, which is what is meant.
        checkpoint.load(state, checkpoint_id=tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name


def test_meta_models_are_initialised_stage_by_stage() -> None:
    model, batch = _make("gpt2")
    with torch.device("meta"):
        meta = type(model)(model.config)
    wanted = Wanted((2, 2), "1f1b", 2)
    ready = _ready("gpt2", wanted)

    def work(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", wanted.mesh)
        own = copy.deepcopy(meta)
        compiler = PipelineCompiler(own, wanted, rank, ready)
        parallel = ParallelModule(own, mesh, compiler, seed=3)
        step(parallel, batch)
        whole = copy.deepcopy(meta)
        materialise(whole, torch.device("cpu"), 3)
        held = 0
        for name, parameter in whole.named_parameters():
            here = dict(parallel.named_parameters())[name]
            held += here.to_local().numel()  # type: ignore[attr-defined]
            check_equal(parallel.full_tensor(here), parameter.detach(), name, 0.0)
        assert held < 0.9 * sum(parameter.numel() for parameter in whole.parameters())

    run_local(work, 4, timeout=100, backend="gloo")


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_fails_in_a_step_ends_it(how: str) -> None:
    """Within seconds, and with that rank's error, whoever waits for it."""

    def fails(model: ParallelModule, reference: nn.Module, batch: Any) -> None:
        step(model, batch)
        if torch.distributed.get_rank() == 2:
            forward, calls = ChunkExecutable.forward, itertools.count()

            def broken(self: ChunkExecutable, inputs: list[torch.Tensor]) -> Any:
                if next(calls) == 2:
                    if how == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise ValueError("out of luck")
                return forward(self, inputs)

            ChunkExecutable.forward = broken  # type: ignore[method-assign]
        step(model, batch)

    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)rank 2 of 4" + (".*out of luck" if how == "raises" else "")):
        on_ranks("gpt2", Wanted((4, 1), "1f1b", 5), fails, timeout=90)
    assert time.monotonic() - begin < 80
