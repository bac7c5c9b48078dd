"""Checkpoints that fit any mesh and any plan: :func:`save`, :func:`load`, and :class:`Checkpointer` for loops.

A checkpoint is a folder: tensors in safetensors files, an index of them, everything else as JSON, and a manifest with
sizes and hashes, which is written last. Nothing in it is pickled.
"""

from autopar.runtime.checkpoint.checkpointer import Checkpointer
from autopar.runtime.checkpoint.load import Checkpoint, load
from autopar.runtime.checkpoint.save import save

from .errors import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "Checkpointer", "load", "save"]
