"""Checks that all ranks run the same plan: a difference would cause a deadlock or, worse, wrong numbers."""

from __future__ import annotations

import hashlib

import torch

from autopar.errors import PlanMismatchError

from .collectives import Collectives
from .groups import MeshGroups
from .minority import minority, named


def check_agreement(fingerprint: str, groups: MeshGroups) -> None:
    """Compares a hash of ``fingerprint`` and torch's version over the mesh. Raises
    :class:`PlanMismatchError`, on every rank, naming the fewer ranks that differ from the others."""
    digest = hashlib.sha256(f"{torch.__version__}\n{fingerprint}".encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(groups.device).unsqueeze(0)
    ranks = groups.mesh.mesh.flatten().tolist()
    everyone = Collectives(groups).all_gather(own, groups.axes, 0, len(ranks)).wait()
    odd, others = ([ranks[place] for place in places] for places in minority([bytes(row.tolist()) for row in everyone]))
    if odd:
        raise PlanMismatchError(
            f"{named(odd)} {'has' if len(odd) == 1 else 'have'} another plan, graph or torch version than "
            f"{named(others)}: build the same model with the same options on every rank"
        )
