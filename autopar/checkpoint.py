"""Checkpoints that fit any mesh and any plan: :func:`save`, :func:`load`, and :class:`Checkpointer` for loops.

Weights alone: :func:`save_safetensors` and :func:`load_weights` in the format of Hugging Face, :func:`full_state_dict`
for one process.

A checkpoint is a folder: tensors in safetensors files, an index of them, everything else as JSON, and a manifest with
sizes and hashes, which is written last. Nothing in it is pickled.
"""

from autopar.runtime.checkpoint.checkpointer import Checkpointer
from autopar.runtime.checkpoint.hugging_face import full_state_dict, load_weights, save_safetensors
from autopar.runtime.checkpoint.load import Checkpoint, load
from autopar.runtime.checkpoint.save import save

from .errors import CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Checkpointer",
    "full_state_dict",
    "load",
    "load_weights",
    "save",
    "save_safetensors",
]
