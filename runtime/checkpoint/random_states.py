"""The states of the random generators that a training script may use: torch's, Python's and numpy's, of each rank.

What the model draws is not among them: it is a function of seed, step and place (``model.random_state()``).
"""

from __future__ import annotations

import base64
import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from autopar.errors import CheckpointError

# The most bytes of a state. Chosen: torch's is the longest, and has 5056.
_LONGEST = 1 << 20


def random_states() -> dict[str, Any]:
    """The states of this process, as JSON."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "torch": _text(torch.get_rng_state().numpy()),
        "python": [version, _text(np.asarray(numbers, dtype=np.uint32)), gauss],
        "numpy": [str(kind), _text(np.asarray(keys, np.uint32)), int(position), int(has_gauss), float(cached)],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = _text(torch.cuda.get_rng_state().numpy())
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Restores what :func:`random_states` returned. Raises :class:`CheckpointError` for anything else."""
    try:
        version, numbers, gauss = states["python"]
        kind, keys, *rest = states["numpy"]
        python, numpy = (version, tuple(_array(numbers).tolist()), gauss), (kind, _array(keys), *rest)
        torch.set_rng_state(_tensor(states["torch"]))
        random.setstate(python)
        np.random.set_state(numpy)
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(_tensor(states["cuda"]))
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError, zlib.error) as error:
        raise CheckpointError(f"the checkpoint's states of random generators are none: {error}") from error


def _text(state: Any) -> str:
    """The bytes of an array, compressed: each rank has some thousand, many of them zero."""
    return base64.b64encode(zlib.compress(state.tobytes())).decode()


def _bytes(text: str) -> bytearray:
    content = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _LONGEST)
    return bytearray(content)


def _array(text: str) -> Any:
    return np.frombuffer(_bytes(text), dtype=np.uint32)


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(_bytes(text), dtype=torch.uint8)
