"""What checkpoints have of several replicas (:mod:`autopar.runtime.averaging`).

The first replica's tensors have the usual names, so that its weights load anywhere. Those of the others begin with
``replica-1/`` and so on. What exchanges depend on (anchors, momentum of the outer optimizer, what codes lost) is saved
by rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.runtime.averaging.replica_module import ReplicaModule

from .boxes import Holders
from .ranks import Ranks
from .tree_json import to_json

# Of the state of a training, what differs between replicas.
OWN = ("model", "optimizer", "parallel")
Held = dict[str, tuple[torch.Tensor, Holders]]


def replica_of(model: nn.Module) -> tuple[int, int]:
    """The index of this rank's replica, and how many there are."""
    return (model.replica, model.replicas) if isinstance(model, ReplicaModule) else (0, 1)


def holders_in(model: nn.Module, ranks: Ranks) -> Holders:
    """The ranks that have the plain tensors of ``model``: those of the replica, which follow each other."""
    index, count = replica_of(model)
    inside = ranks.count // count
    return Holders(inside, ranks.index - index * inside)


def prefix_of(replica: int) -> str:
    """What names of a replica's tensors begin with."""
    return f"replica-{replica}/" if replica else ""


def averaging_of_rank(rank: int) -> str:
    """What names of a rank's tensors for exchanges begin with."""
    return f"averaging.rank-{rank}"


def exchanges(model: nn.Module, ranks: Ranks, tensors: Held) -> Any:
    """This rank's state of exchanges as JSON; adds its tensors. Waits for those in flight. None without any."""
    averaging = model.autopar_averaging if isinstance(model, ReplicaModule) else None
    if averaging is None:
        return None
    found: dict[str, torch.Tensor] = {}
    encoded = to_json(averaging.state(), averaging_of_rank(ranks.index), found)
    tensors.update({name: (tensor, Holders(1, 0)) for name, tensor in found.items()})
    return encoded


def of_all(model: nn.Module, ranks: Ranks, own: Mapping[str, Any], exchanging: Any) -> dict[str, Any]:
    """The state of all replicas and exchanges; empty where there is one. Collective."""
    count = replica_of(model)[1]
    if not isinstance(model, ReplicaModule):
        return {}
    everyone = ranks.all(({name: own[name] for name in OWN if name in own}, exchanging))
    firsts = everyone[:: ranks.count // count]
    return {
        "replicas": [state for state, _ in firsts],
        "averaging": {"sync": model.sync_text, "ranks": [exchanged for _, exchanged in everyone]},
    }
