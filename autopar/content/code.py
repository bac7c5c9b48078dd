"""The part of :mod:`.objects` that hashes code: modules, classes, functions and what they refer to.

Code is the user's if its file belongs neither to Python nor to an installed distribution; code typed into a notebook is
the user's. All of the user's code that a model may run is hashed with the values that it refers to. Of a library, the
version is hashed and, for each of its modules that defines a model's classes or functions, the code of its functions.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.torch_internals.operators import HigherOrderOperator, OpOverload, OpOverloadPacket

from .code_origin import code_text, file_of, is_library, version_of
from .feed import Feed, Unkeyable
from .libraries import modules_with_registries, package_digest, registered

_BUILTIN: tuple[type, ...] = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType),
    *(types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
)
_OPERATORS = (OpOverload, OpOverloadPacket, HigherOrderOperator)
_TYPING: tuple[type, ...] = (types.GenericAlias, types.UnionType)
_WRAPPERS = (property, staticmethod, classmethod, functools.cached_property, type(functools.lru_cache(len)))
_INNER = ("fget", "fset", "__func__", "func", "__wrapped__")
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
# Modules that read from outside of the model: the code of a function that uses them does not determine what it
# computes.
_OUTSIDE = frozenset(
    ("os", "random", "time", "datetime", "secrets", "uuid", "socket", "subprocess", "platform", "getpass", "tempfile")
) | {"numpy.random", "torch.distributed", "sys", "gc", "psutil", "requests", "urllib"}
_OUTSIDE |= {"safetensors", "pyarrow", "h5py", "sqlite3", "pathlib", "mmap", "pickle"}
_OUTSIDE_NAMES = frozenset(("open", "input", "globals", "exec", "eval", "__import__", "id", "hash"))
# What a hash is made of, as in a frozen dataclass. Only code that uses ``hash`` itself, or the order of a set of
# objects, which are refused, could tell one hash from another.
_HASHED = frozenset(("id", "hash"))
# Names under which libraries read files.
_READERS = frozenset(("load", "loadtxt", "genfromtxt", "fromfile", "from_file", "memmap", "load_file", "safe_open")) | {
    *("read_text", "read_bytes", "read_csv", "read_json", "read_parquet", "read_pickle", "read_table", "read_feather"),
    *("read_image", "imread", "from_pretrained", "load_state_dict_from_url"),
}
# Names through which a function may reach any member of a module.
_ANY_MEMBER = frozenset(("getattr", "vars", "__dict__"))
_PLAIN = (type(None), bool, int, float, complex, str, tuple, torch.dtype)
_OF_MODULES = frozenset(
    ("__name__", "__doc__", "__package__", "__file__", "__cached__", "__builtins__", "__dict__")
) | {*("__path__", "__spec__", "__loader__")}
# What Python itself stores in a class.
_OF_CLASSES = (
    "__dict__",
    "__weakref__",
    "__doc__",
    "__annotations",
    "_abc_",
    "__abstract",
    "__firstlineno",
    "__module",
)
# Methods that run when an object is printed, pickled or deleted.
_NOT_CALLED = frozenset(("__repr__", "__str__", "__del__", "__init_subclass__", "__reduce__", "__getstate__"))


@dataclass(frozen=True)
class _Function:
    """A function of the user: the names it refers to, and what it reads from outside of the model."""

    name: str
    names: frozenset[str]
    outside: str


class Code:
    """The code that one :class:`.Contents` has met."""

    def __init__(self, contents: Feed) -> None:
        self._contents = contents
        self._libraries: dict[str, None] = dict.fromkeys(("torch", "torch.nn.functional", "torch.nn.modules.module"))
        self._functions: dict[int, _Function] = {}
        # The functions, by id, that a name may refer to.
        self._named: dict[str, set[int]] = {}
        # The user's modules, and the names of their members that were fed.
        self._modules: dict[str, tuple[types.ModuleType, set[str]]] = {}
        self._searched: set[str] = set()

    def note(self, name: str, value: object) -> None:
        """Records that ``name`` may refer to ``value``."""
        if isinstance(value, types.FunctionType):
            self._named.setdefault(name, set()).add(id(value))

    def feed(self, value: Any, where: str) -> bool:
        """Feeds ``value`` if it is code; returns whether it is."""
        contents = self._contents
        if isinstance(value, types.ModuleType):
            self._note_module(value)
            contents.add("module", value.__name__)
        elif isinstance(value, type):
            self._class(value, where)
        elif isinstance(value, types.FunctionType):
            self._function(value, where)
        elif isinstance(value, types.MethodType):
            contents.add("method")
            contents.feed(value.__self__, where)
            contents.feed(value.__func__, where)
        elif isinstance(value, _BUILTIN):
            self._builtin(value, where)
        elif isinstance(value, _OPERATORS):
            contents.add("operator", str(value))
        elif isinstance(value, _WRAPPERS):
            contents.add(type(value).__name__)
            for name in _INNER:
                contents.feed(getattr(value, name, None), where)
        elif isinstance(value, _TYPING) or type(value).__module__ == "typing":
            contents.add("typing", repr(value))
        elif isinstance(value, types.CodeType):
            contents.add("code", code_text(value))
        elif isinstance(value, _LOCKS):
            contents.add("lock")
        else:
            return False
        return True

    def finish(self) -> None:
        """Feeds what the code met so far relies on. Raises :class:`.Unkeyable` if code that may run when the model is
        called reads from outside of the model."""
        done: set[str] = set()
        count = -1
        while count != self._contents.count:
            count = self._contents.count
            self._members_of_modules()
            self._registries()
            while pending := [name for name in self._libraries if name not in done]:
                for name in pending:
                    done.add(name)
                    self._library(name)
        for top in sorted({name.partition(".")[0] for name in self._libraries}):
            self._contents.add(top, package_digest(top))
        for function in self._reached():
            if function.outside:
                raise Unkeyable(f"{function.name} uses {function.outside}, which is outside of the model")

    def _members_of_modules(self) -> None:
        """Feeds what the user's functions may read from the user's modules: members that any of them names."""
        names = {name for function in self._functions.values() for name in function.names} | {"__getattr__"}
        is_any = not names.isdisjoint(_ANY_MEMBER)
        while True:
            before = len(self._modules)
            for module, fed in list(self._modules.values()):
                unfed = {name: value for name, value in vars(module).items() if name not in fed}
                picked = {n for n, v in unfed.items() if n in names or (is_any and type(v) in _PLAIN)}
                fed |= picked
                members = [(name, unfed[name]) for name in sorted(picked - _OF_MODULES)]
                self._contents.feed_all("members", members, module.__name__)
            if len(self._modules) == before:
                return

    def _registries(self) -> None:
        """Feeds the user's code that is registered in libraries, which may call it."""
        for name in modules_with_registries(set(self._libraries)):
            if name not in self._searched:
                self._searched.add(name)
                module = sys.modules.get(name)
                entries = list(registered(module)) if isinstance(module, types.ModuleType) else []
                if entries:
                    self._contents.feed_all("registered", entries, name)

    def _reached(self) -> Iterator[_Function]:
        """Yields the functions that may run when the model is called: those that others of them refer to by name."""
        done: set[str] = set()
        pending = {"", "forward"} | {name for name in self._named if name.startswith("__")} - _NOT_CALLED
        while pending - done:
            name = min(pending - done)
            done.add(name)
            for function in [self._functions[i] for i in self._named.get(name, ()) if i in self._functions]:
                yield function
                pending |= set(self._named) if "getattr" in function.names else function.names & set(self._named)

    def _builtin(self, value: Any, where: str) -> None:
        owner = getattr(value, "__self__", None)
        module = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", "")
        if isinstance(module, str) and module in _OUTSIDE:
            raise Unkeyable(f"{where} is {module}.{value.__name__}, which reads what is outside of the model")
        self._contents.add("builtin", module, getattr(value, "__qualname__", value.__name__))
        if owner is not None and not isinstance(owner, types.ModuleType):
            self._contents.feed(owner, where)

    def _class(self, kind: type, where: str) -> None:
        for base in kind.__mro__:
            self._contents.add("class", base.__module__, base.__qualname__)
            if self._contents.is_repeated(base) and base is not kind:
                continue
            if base.__module__ == "builtins":
                continue
            if is_library(file_of(base)):
                self._libraries.setdefault(base.__module__)
                self._library_members(vars(base))
            else:
                constructors = ("__init__", "__new__") if issubclass(base, nn.Module) else ()
                members = [
                    (n, v) for n, v in vars(base).items() if n not in constructors and not n.startswith(_OF_CLASSES)
                ]
                self._contents.feed_all("members", members, where or base.__qualname__)

    def _function(self, function: types.FunctionType, where: str) -> None:
        contents, code = self._contents, function.__code__
        contents.add("function", function.__module__, function.__qualname__, code_text(code))
        contents.feed((function.__defaults__, function.__kwdefaults__), where)
        contents.feed_all("closure", zip(code.co_freevars, map(_cell_contents, function.__closure__ or ())), where)  # noqa: B905
        if is_library(file_of(function)):
            # A wrapper of a user's function has the name of that function's module.
            self._libraries.setdefault(str(function.__globals__.get("__name__", function.__module__)))
            return
        contents.feed_all("attributes", function.__dict__.items(), where)
        self._references(function)

    def _references(self, function: types.FunctionType) -> None:
        """Feeds what a user's function refers to in its module, and in modules that it imports."""
        names, imported = _names_in(function.__code__)
        module_globals = function.__globals__
        referenced = {name: module_globals[name] for name in sorted(names) if name in module_globals}
        allowed = _HASHED if function.__name__ == "__hash__" else frozenset()
        reasons = [n for n in names & _OUTSIDE_NAMES - allowed if n not in module_globals and hasattr(builtins, n)]
        reasons += names & _READERS
        reasons += [name for name in imported if _is_outside(name)]
        modules = {n: v for n, v in referenced.items() if isinstance(v, types.ModuleType)}
        modules |= {name: sys.modules[name] for name in imported if name in sys.modules}
        reasons += [r for module in modules.values() for r in _read_outside(module, names)]
        reasons += [n for n, v in referenced.items() if _is_outside(_module_of(v))]
        outside = ", ".join(sorted(set(reasons)))
        self._functions[id(function)] = _Function(function.__qualname__, frozenset(names), outside)
        where = function.__qualname__
        values = {n: v for n, v in referenced.items() if n not in modules and not _is_outside(_module_of(v))}
        self._contents.feed_all("globals", values.items(), where)
        for name, module in modules.items():
            self.feed(module, name)

    def _note_module(self, module: types.ModuleType) -> None:
        if is_library(file_of(module)):
            self._libraries.setdefault(module.__name__)
        elif not module.__name__.startswith("torch."):  # As torch.ops, which has no file.
            self._modules.setdefault(module.__name__, (module, set()))

    def _library(self, name: str) -> None:
        """Feeds a module of a library: its version, and its functions, which someone may have replaced."""
        if name == "autopar" or name.startswith("autopar."):
            return  # Its sources are hashed as a whole.
        module = sys.modules.get(name)
        self._contents.add("library", name, version_of(name))
        if module is not None:
            self._library_members(vars(module))

    def _library_members(self, members: Any) -> None:
        for name, value in list(members.items()):
            inner = _inner(value)
            if isinstance(inner, types.FunctionType):
                if is_library(file_of(inner)):
                    self._contents.add(name, inner.__module__, inner.__qualname__, code_text(inner.__code__))
                else:
                    self._contents.feed(inner, name)
            elif isinstance(value, type):
                self._contents.add(name, value.__module__, value.__qualname__)
                if not is_library(file_of(value)):
                    self._contents.feed(value, name)
            elif type(value) in (bool, int, float):
                self._contents.add(name, repr(value))


def _inner(value: Any) -> Any:
    """The function in a method of a class."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _module_of(value: Any) -> object:
    """The module of a class or function; "" for other objects, whose ``__module__`` may be anything."""
    return value.__module__ if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) else ""


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "nothing yet"


def _names_in(code: types.CodeType) -> tuple[set[str], set[str]]:
    """The global and attribute names in ``code`` and in the functions inside it, and the modules that they import."""
    names, imported = {*code.co_names, *code.co_freevars}, set[str]()
    if dis.opmap["IMPORT_NAME"] in code.co_code[::2]:
        imported.update(i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, modules = _names_in(constant)
            names |= inner
            imported |= modules
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)  # As in getattr(model, "name").
    return names, imported


def _is_outside(module: object) -> bool:
    return isinstance(module, str) and any(module == name or module.startswith(f"{name}.") for name in _OUTSIDE)


def _read_outside(module: types.ModuleType, names: set[str]) -> list[str]:
    """The modules outside of the model that ``names`` may reach in ``module``."""
    itself = [module.__name__] if _is_outside(module.__name__) else []
    inner = [f"{module.__name__}.{name}" for name in names if isinstance(vars(module).get(name), types.ModuleType)]
    return [*itself, *filter(_is_outside, inner)]
