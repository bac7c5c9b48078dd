"""Checks that all ranks run the same plan: a difference would cause a deadlock or, worse, wrong numbers."""

from __future__ import annotations

import hashlib

import torch

from autopar.errors import PlanMismatchError

from .collectives import Collectives
from .groups import MeshGroups


def check_agreement(fingerprint: str, groups: MeshGroups) -> None:
    """Compares a hash of ``fingerprint`` and torch's version over the mesh. Raises
    :class:`PlanMismatchError`, on every rank, naming the ranks that differ from the first."""
    digest = hashlib.sha256(f"{torch.__version__}\n{fingerprint}".encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(groups.device).unsqueeze(0)
    ranks = groups.mesh.mesh.flatten().tolist()
    everyone = Collectives(groups).all_gather(own, groups.axes, 0, len(ranks)).wait()
    different = [rank for rank, row in zip(ranks, everyone, strict=True) if not torch.equal(row, everyone[0])]
    if different:
        raise PlanMismatchError(
            f"ranks {', '.join(map(str, different))} have another plan, graph or torch version than "
            f"rank {ranks[0]}: build the same "
            "model with the same options on every rank"
        )
