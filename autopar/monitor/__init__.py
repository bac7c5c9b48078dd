"""What a training does, step by step: :class:`Monitor` writes loss, speed, memory and stragglers.

>>> from autopar.monitor import Monitor
"""

from .monitor import Monitor
from .record import StepRecord

__all__ = ["Monitor", "StepRecord"]
