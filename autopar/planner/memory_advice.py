"""Advice for models that do not fit, with and without stages: the texts, and the options that follow them."""

from __future__ import annotations

from dataclasses import replace

from autopar.options import Options
from autopar.plans.views.quantities import size

LESS_STATE = "an optimizer with less state"


def recompute_more(options: Options) -> tuple[str, Options]:
    """The advice to recompute, and ``options`` that follow it."""
    return "recompute=None or 'full'", replace(options, recompute=None)


def offload_more(options: Options) -> tuple[str, Options]:
    """The advice to offload, and ``options`` that follow it."""
    return "offload=None or True", replace(options, offload=None)


def twice_the_devices(least: float) -> str:
    """The advice to use more devices. ``least``: bytes per device that are enough with the present ones."""
    return f"twice the devices, about {size(least / 2)} if all divides"
