"""Where code comes from: libraries, which have versions, or the user's own files."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import types
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import sympy
import torch

# The folders in which distributions are installed, including those of an environment that this one inherits from.
_INSTALLED = frozenset(("site-packages", "dist-packages"))
_HANDLERS = ("__torch_function__", "__torch_dispatch__")
_STANDARD = os.path.dirname(os.__file__) + os.sep
_texts: WeakKeyDictionary[types.CodeType, str] = WeakKeyDictionary()


def file_of(value: Any) -> str:
    """The file that defines a module, class or function; "" if there is none."""
    code = getattr(value, "__code__", None)
    if isinstance(code, types.CodeType) and not code.co_filename.startswith("<"):
        return str(code.co_filename)
    module = value if isinstance(value, types.ModuleType) else sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None:
        return ""
    if module.__name__ in sys.builtin_module_names:
        return _stdlib()
    return str(getattr(module, "__file__", None) or "")


@lru_cache(maxsize=1 << 12)
def is_library(file: str) -> bool:
    """Whether ``file`` belongs to Python, to an installed distribution or to autopar."""
    # As text: paths are ten times slower, and every file of every loaded module is asked about at each start.
    return not _INSTALLED.isdisjoint(file.split(os.sep)) or file.startswith(_folders())


@lru_cache(maxsize=1)
def _folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    python = (os.path.join(paths[name], "") for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return (*python, *_known_folders())


@lru_cache(maxsize=1)
def own_folders() -> dict[str, str]:
    """The packages of autopar that have folders of their own in a checkout -> their folders."""
    specs = {name: find_spec(name) for name in ("autopar", "autopar.passes", "autopar.cost", "autopar.runtime")}
    return {name: next(iter(spec.submodule_search_locations or ())) for name, spec in specs.items() if spec}


def is_written_by_user(value: Any) -> bool:
    """Whether a function, a class or the class of an object is defined in the user's own files, or at a prompt."""
    code = value if isinstance(value, (types.FunctionType, type)) else type(value)
    file = file_of(code)
    return not is_library(file) if file else code.__module__ == "__main__"


def is_model_code(filename: str, function: str) -> bool:
    """Whether a frame runs code of the author of a model, which may be installed (transformers): not torch's, autopar's
    or the standard library's, nor a method that only handles a call of torch made elsewhere."""
    return function not in _HANDLERS and not filename.startswith((*_known_folders(), "<")) and not _is_stdlib(filename)


@lru_cache(maxsize=1)
def _known_folders() -> tuple[str, ...]:
    libraries = (os.path.dirname(file) for file in (torch.__file__, sympy.__file__, np.__file__))
    return tuple(folder + os.sep for folder in (*libraries, *own_folders().values()))


def _is_stdlib(filename: str) -> bool:
    return filename.startswith(_STANDARD) and "site-packages" not in filename


@lru_cache(maxsize=1)
def _stdlib() -> str:
    return str(Path(sysconfig.get_paths()["stdlib"]) / "os.py")


@lru_cache(maxsize=1 << 12)
def version_of(module: str) -> str:
    """The version of the distribution that ``module`` belongs to, or the time at which its file was changed."""
    top = module.partition(".")[0]
    declared = getattr(sys.modules.get(top), "__version__", None)
    if isinstance(declared, str):
        return declared
    try:
        return version(top)
    except PackageNotFoundError:
        file = getattr(sys.modules.get(module), "__file__", None)
        return str(Path(file).stat().st_mtime_ns) if file and Path(file).exists() else sys.version


def code_text(code: types.CodeType) -> str:
    """A hash of what ``code`` does, whatever its position in its file."""
    digest = _texts.get(code)
    if digest is None:
        constants = [code_text(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts]
        body = (code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        flags = (
            code.co_argcount,
            code.co_kwonlyargcount,
            code.co_posonlyargcount,
            code.co_flags,
            code.co_exceptiontable,
        )
        digest = hashlib.sha256(repr((body, flags)).encode()).hexdigest()
        _texts[code] = digest
    return digest


def _constant(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(repr, value))}"
    return f"{type(value).__name__} {value!r}"
