"""Parses the arguments of a command line: models by ``module:attribute``, meshes, sizes in bytes, pins."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar.byte_sizes import parse_bytes
from autopar.errors import OptionsError
from autopar.layout import Layout
from autopar.optimizers import OPTIMIZERS
from autopar.options import CHOICES, Options

Batch = tuple[Any, ...] | Mapping[str, Any]
TARGET_HELP = "file.py:function or module:function, which returns (model, batch)"
CONFIG_HELP = "or, with --devices, the config.json of a transformers model"
# Fields of Options that a command line may leave out.
GIVEN = (
    *("memory_limit", "precision", "zero", "recompute", "offload", "microbatches", "stages", "schedule"),
    *("time_limit", "gap", "seed", "optimizer", "layout"),
)

_EXAMPLE = "a function without arguments that returns (model, batch), written file.py:function or module:function"


def parse_mesh(text: str) -> tuple[int, ...]:
    """``"2,2"`` or ``"2x2"`` as ``(2, 2)``, outermost axis (slowest link) first.

    Raises:
        OptionsError: if a size is not a positive integer.
    """
    parts = re.split(r"[,x]", text.strip("() ").removesuffix(","))
    if not all(re.fullmatch(r"\s*[1-9]\d*\s*", part) for part in parts):
        raise OptionsError(f"{text!r} is not a mesh; write positive sizes, outermost first: 4 or 2,2 or 2,1,2")
    return tuple(map(int, parts))


def parse_pins(texts: list[str]) -> dict[str, str]:
    """``["lm_head.weight=S(0),R"]`` as ``{"lm_head.weight": "S(0),R"}``.

    Raises:
        OptionsError: if one has no ``=``, or two disagree.
    """
    pins: dict[str, str] = {}
    for text in texts:
        name, equals, placements = (part.strip() for part in text.partition("="))
        if not (name and equals and placements):
            raise OptionsError(f"{text!r} is not a pin; write NAME=PLACEMENTS, such as 'lm_head.weight=S(0),R'")
        if pins.setdefault(name, placements) != placements:
            raise OptionsError(f"{name!r} is pinned twice: to {pins[name]} and to {placements}")
    return pins


def load_target(text: str, meta: bool = False) -> tuple[nn.Module, Batch]:
    """The model and the global batch that ``file.py:function`` or ``module:function`` names.

    Args:
        text: the attribute is called if it is callable; it (or its result) is the pair ``(model, batch)``.
        meta: call it under ``torch.device("meta")``: a model too large for this machine takes no memory.

    Raises:
        OptionsError: if there is no such file, module or attribute, or it is not such a pair. What the
            function itself raises is not caught.
    """
    source, colon, attribute = text.rpartition(":")
    if not (colon and source and attribute):
        raise OptionsError(f"{text!r} names no model; give {_EXAMPLE}")
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    target: Any = module
    for name in attribute.split("."):
        if not hasattr(target, name):
            raise OptionsError(f"{source} has no {attribute!r}{_public_functions(module)}")
        target = getattr(target, name)
    device = torch.device("meta") if meta else contextlib.nullcontext()
    with device:
        result = target() if callable(target) and not isinstance(target, nn.Module) else target
    return _model_and_batch(text, result)


def _load_file(path: Path) -> ModuleType:
    import cloudpickle

    if not path.is_file():
        raise OptionsError(f"there is no file {str(path)!r} in {os.getcwd()}")
    # A file called random.py must not replace the module everyone else imports.
    name = f"autopar_target_{path.stem}" if path.stem in sys.modules else path.stem
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise OptionsError(f"{str(path)!r} cannot be imported as Python")
    sys.path.insert(0, str(path.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    # Worker processes cannot import the file by name: its classes are pickled by value.
    cloudpickle.register_pickle_by_value(module)
    return module


def _load_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only a wrong name on the command line is reported here; a missing import inside the user's module is raised.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise OptionsError(f"there is no module {name!r}; for a file, write its name with .py") from error


def _public_functions(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]
    return f"; it has {', '.join(names[:8])}" if names else ""


def _model_and_batch(text: str, result: object) -> tuple[nn.Module, Batch]:
    match result:
        case (nn.Module() as model, torch.Tensor() as tensor):
            return model, (tensor,)
        case (nn.Module() as model, Mapping() | tuple() as batch):
            return model, batch
        case (nn.Module() as model, list() as batch):
            return model, tuple(batch)
        case tuple():
            kinds = ", ".join(type(item).__name__ for item in result)
            raise OptionsError(f"{text} gave ({kinds}), not (model, batch); give {_EXAMPLE}")
    raise OptionsError(f"{text} gave a {type(result).__name__}, not (model, batch); give {_EXAMPLE}")


def options_from(arguments: argparse.Namespace) -> Options:
    """The :class:`Options` a command line asks for; what it leaves out keeps its default."""
    fields = {name: getattr(arguments, name) for name in GIVEN if getattr(arguments, name) is not None}
    return Options(**fields, pins=parse_pins(arguments.pin), mesh_search=arguments.mesh_search)


def checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse``, whose errors argparse then reports with the usage."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except OptionsError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def positive(text: str) -> int:
    """A whole number above 0. Raises :class:`OptionsError`."""
    if not text.isdecimal() or int(text) < 1:
        raise OptionsError(f"{text!r} is not a positive whole number")
    return int(text)


def stages_of(text: str) -> int | tuple[int, ...]:
    """A number of stages, or of the devices of each, as in ``1+3``. Raises :class:`OptionsError`."""
    return tuple(map(positive, text.split("+"))) if "+" in text else positive(text)


def not_negative(text: str) -> int:
    """A whole number, 0 or above. Raises :class:`OptionsError`."""
    if not text.isdecimal():
        raise OptionsError(f"{text!r} is not a whole number, 0 or above")
    return int(text)


def add_mesh(parser: Any, required: bool) -> None:
    """Adds ``--mesh``."""
    text = "shape of the device mesh, outermost (slowest link) first: 2,2"
    parser.add_argument("--mesh", type=checked(parse_mesh), required=required, help=text)


def add_planning(parser: argparse.ArgumentParser) -> None:
    """Adds the options of every command that plans; what the user leaves out is searched, or has the default of
    :class:`Options`."""

    def add_choice(name: str, text: str) -> None:
        allowed = CHOICES[name]
        group.add_argument(f"--{name}", type=type(allowed[0]), choices=allowed, help=text)

    group = parser.add_argument_group("planning")
    group.add_argument(
        "--cluster",
        help="hardware to price for: a preset such as dgx-a100-80gb, local, or the path or URL of a calibration",
    )
    group.add_argument("--memory-limit", type=checked(parse_bytes), help="bytes per device: 10GiB")
    group.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="NAME=PLACEMENTS",
        help="fix the placements of a weight or module: 'lm_head.weight=S(0),R'; globs and repeats allowed",
    )
    add_choice("precision", "what products are computed in")
    add_choice("zero", "fix the ZeRO stage instead of searching")
    recompute = "compute saved values again instead of keeping them; by default whatever makes the step fit"
    offload = "keep optimizer state in host memory; by default where that makes the step fit"
    group.add_argument("--offload", action=argparse.BooleanOptionalAction, default=None, help=offload)
    add_choice("recompute", recompute)
    group.add_argument("--microbatches", type=checked(positive))
    stages = "number of pipeline stages, or the devices of each: 1+3"
    group.add_argument("--stages", type=checked(stages_of), metavar="NUMBER", help=stages)
    group.add_argument("--schedule")
    layout = "only plans of this layout; what it leaves out is searched: tensor=8,pipeline=2,sequence_parallel=true"
    group.add_argument("--layout", type=checked(Layout.parse), metavar="NAME=VALUE,...", help=layout)
    group.add_argument("--optimizer", choices=sorted(OPTIMIZERS), help="decides the bytes of optimizer state")
    group.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="of computing, for the solvers (default: counted work)"
    )
    group.add_argument("--gap", type=float, help="relative distance from the proven bound that is good enough")
    group.add_argument("--seed", type=int)
    group.add_argument("--no-mesh-search", dest="mesh_search", action="store_false", help="keep the axes as given")
