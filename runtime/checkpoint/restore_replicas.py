"""Restores replicas: each its own state, where there are as many as there were; otherwise all that of the first."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from torch import nn

from autopar.runtime.averaging.replica_module import ReplicaModule

from .opened import Opened, reading_state
from .ranks import Ranks
from .replica_state import prefix_of, replica_of
from .tree_json import from_json


def of_replica(opened: Opened, model: nn.Module, ranks: Ranks) -> Opened:
    """The part of a checkpoint that this rank's replica restores."""
    index, _ = replica_of(model)
    if index == 0 or not _as_saved(opened, model, ranks):
        return opened
    prefix = prefix_of(index)
    entries = {name.removeprefix(prefix): entry for name, entry in opened.index.items() if name.startswith(prefix)}
    with reading_state(opened):
        return replace(opened, index=entries, state={**opened.state, **opened.state["replicas"][index]})


def restore_exchanges(opened: Opened, model: nn.Module, ranks: Ranks) -> None:
    """Restores what exchanges depend on, of the whole checkpoint ``opened``. Warns where it is left out."""
    averaging = model.autopar_averaging if isinstance(model, ReplicaModule) else None
    saved = opened.state.get("averaging")
    if averaging is None:
        return
    averaging.forget()
    if saved is None:
        return
    with reading_state(opened):
        if _as_saved(opened, model, ranks):
            averaging.load(from_json(saved["ranks"][ranks.index], opened.whole))
            return
        what = f"{len(opened.state['replicas'])} replicas on {len(saved['ranks'])} ranks, {saved['sync']}"
    warnings.warn(
        f"{opened.store} was saved by {what}: other replicas than these. All begin from the weights of its first, "
        "without what its exchanges kept (momentum of the outer optimizer, what codes lost)",
        stacklevel=2,
    )


def _as_saved(opened: Opened, model: nn.Module, ranks: Ranks) -> bool:
    """Whether ``model`` has the replicas, ranks and exchanges that were saved."""
    with reading_state(opened):
        saved: Any = opened.state.get("averaging")
        if saved is None or not isinstance(model, ReplicaModule):
            return False
        same = len(opened.state["replicas"]) == model.replicas and len(saved["ranks"]) == ranks.count
        return bool(same and saved["sync"] == model.sync_text)
