"""All models of the zoo by name."""

from __future__ import annotations

from . import blocks as _blocks  # noqa: F401  (registers)
from . import decoders as _decoders  # noqa: F401
from . import encoders as _encoders  # noqa: F401
from . import generative as _generative  # noqa: F401
from . import vision as _vision  # noqa: F401
from .hugging_face import FAMILIES, Batch, Maker
from .plain import MODELS

__all__ = ["ZOO", "Batch", "Maker"]
ZOO: dict[str, Maker] = {**MODELS, **FAMILIES}
