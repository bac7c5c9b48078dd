"""Loads a checkpoint into a model, an optimizer and what else was saved, on any mesh and under any plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.errors import CheckpointError
from autopar.runtime.module.parallel_module import ParallelModule

from .opened import Opened, open_checkpoint, reading_state
from .random_states import restore_random_states
from .ranks import Ranks, ranks_of
from .restore_model import Matched, match_model, restore_model, source_of
from .restore_optimizer import check_optimizer, restore_options, restore_state
from .restore_replicas import of_replica, restore_exchanges
from .snapshot import stateful_of
from .stores import Folder, store_of
from .tree_json import from_json


@dataclass(frozen=True)
class Checkpoint:
    """What :func:`load` returns: where it was, and what else was saved. ``plan``: the text of the plan under which it
    was saved, for :meth:`autopar.Plan.from_json`, or None."""

    folder: str
    step: int
    extra: Any
    plan: str | None


def load(
    folder: Folder,
    model: nn.Module,
    optimizer: Any = None,
    *,
    scheduler: Any = None,
    dataloader: Any = None,
    verify: bool = True,
) -> Checkpoint:
    """Restores what :func:`save` saved, from the newest complete checkpoint in ``folder``, or from ``folder`` itself
    if it is one. Called on every rank that has the model; mesh, plan, precision and number of ranks may be
    others than those that saved.

    Before the first batch of a parallel model there are no shards yet: a model on the meta device, and the state of
    the optimizer, are then read when the first batch has brought the plan, each rank its own parts. The folder has to
    stay until then.

    Args:
        optimizer, scheduler, dataloader: those given are restored; the others are left alone.
        verify: whether all files are compared with their hashes.

    Raises:
        CheckpointError: on every rank; there is no complete checkpoint, a file is damaged (named), or names and shapes
            are not those of the model (named). Nothing has been changed then.
    """
    ranks = ranks_of(model)
    whole = open_checkpoint(store_of(folder), ranks, verify=verify)
    opened = of_replica(whole, model, ranks)
    matched = ranks.together(lambda: _match(opened, model, optimizer))
    ranks.together(lambda: restore_model(source_of(opened), model, matched))
    if optimizer is not None:
        _restore_optimizer(opened, model, optimizer, ranks)
    loader = stateful_of(dataloader)
    if loader is not None:
        loader.load_state_dict(_value(opened, _of_rank(opened, ranks)))
    if scheduler is not None:
        scheduler.load_state_dict(_value(opened, _saved(opened, "scheduler")))
    restore_exchanges(whole, model, ranks)
    with reading_state(opened):
        _restore_random(opened, model, ranks)
        parallel, extra = opened.state.get("parallel") or {}, _value(opened, opened.state["extra"])
        return Checkpoint(str(opened.store), opened.step, extra, parallel.get("plan"))


def _match(opened: Opened, model: nn.Module, optimizer: Any) -> Matched:
    """Compares everything before anything is changed."""
    with reading_state(opened):
        if optimizer is not None:
            check_optimizer(opened, model, optimizer)
        return match_model(opened, model)


def _restore_optimizer(opened: Opened, model: nn.Module, optimizer: Any, ranks: Ranks) -> None:
    def restored(part: Callable[[Opened, nn.Module, Any], None]) -> None:
        with reading_state(opened):
            part(opened, model, optimizer)

    ranks.together(lambda: restored(restore_options))

    def restore() -> None:
        ranks.together(lambda: restored(restore_state))

    if isinstance(model, ParallelModule):
        model.autopar_parts.weights.when_placed(restore)
    else:
        restore()


def _value(opened: Opened, encoded: Any) -> Any:
    return from_json(encoded, opened.whole)


def _saved(opened: Opened, what: str) -> Any:
    value = opened.state.get(what)
    if value is None:
        raise CheckpointError(f"the checkpoint {opened.store} has no {what}: none was given to save; leave it out here")
    return value


def _of_rank(opened: Opened, ranks: Ranks) -> Any:
    """The data loader's state of this rank."""
    saved = _saved(opened, "dataloader")
    if "same" in saved:
        if saved["same"] is None:
            raise CheckpointError(f"the checkpoint {opened.store} has no dataloader: leave it out here")
        return saved["same"]
    if len(saved["by_rank"]) != ranks.count:
        raise CheckpointError(
            f"the data loaders of the {len(saved['by_rank'])} ranks that saved {opened.store} were in different "
            f"states, which {ranks.count} ranks cannot take over: use the sampler of model.sampler(...), whose "
            "state is the same on all ranks"
        )
    return saved["by_rank"][ranks.index]


def _restore_random(opened: Opened, model: nn.Module, ranks: Ranks) -> None:
    """Generators of the script by rank (of more ranks than there were, from the first again), and of the model."""
    generators = opened.state["random"]
    restore_random_states(generators[ranks.index % len(generators)])
    parallel = opened.state.get("parallel")
    if isinstance(model, ParallelModule) and parallel:
        model.set_random_state(parallel["random"])
        if parallel["loss_scale"]:
            model.set_loss_scale_state(parallel["loss_scale"])
