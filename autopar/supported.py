"""The versions of Python and torch that autopar is tested with; ``pyproject.toml`` says the same."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version

import torch

# The oldest supported version, and the first that is too new.
TORCH = ((2, 11), (2, 16))
# The oldest, and the first that is too new: as noxfile.py tests them.
PYTHON = ((3, 11), (3, 14))
Bounds = tuple[tuple[int, int], tuple[int, int]]


def installed_version() -> str:
    """The version of autopar; ``0+unknown`` where only its source is on the path."""
    try:
        return version("autopar")
    except PackageNotFoundError:
        return "0+unknown"


def text(bounds: Bounds) -> str:
    """``2.11 to 2.15``."""
    (first, oldest), (second, newer) = bounds
    return f"{first}.{oldest} to {second}.{newer - 1}"


def requirement(bounds: Bounds) -> str:
    """``>=2.11,<2.16``, as pip reads it."""
    (first, oldest), (second, newer) = bounds
    return f">={first}.{oldest},<{second}.{newer}"


def is_supported(number: str, bounds: Bounds) -> bool:
    """Whether a version such as ``2.13.0+cpu`` is within ``bounds``."""
    major, minor = number.split(".")[:2]
    return bounds[0] <= (int(major), int(minor)) < bounds[1]


def advice(number: str) -> str:
    """The warning about a version of torch; empty if it is supported."""
    if is_supported(number, TORCH):
        return ""
    return (
        f"autopar supports torch {text(TORCH)}, not {number}: it reads private parts of torch that may differ there. "
        f"Smallest change that works: pip install 'torch{requirement(TORCH)}'"
    )


def warn_of_other_torch() -> None:
    """Warns, once in a process, of a torch that is not supported; autopar uses it nevertheless."""
    message = advice(str(torch.__version__))
    if message:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
