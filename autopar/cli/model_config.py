"""Builds the model that a ``config.json`` of transformers describes, without running or fetching anything it names.

The file is untrusted. transformers takes more from it than sizes: classes in repositories (``auto_map``), kernels to
download (``attn_implementation``), weights of backbones. Here such fields are left out if the model is the same without
them and refused if it is not. The network is blocked while the model is built, and the size of the model is limited, so
that a wrong number gives an error message.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from autopar.errors import OptionsError

# Chosen: a config.json has some KB; a file of this size is something else.
MAX_BYTES = 4 << 20
# Chosen: configurations nest a few levels, and Python's own recursion ends far above.
MAX_NESTING = 20
# Chosen: above mixtures of experts in lists (61 layers of 256 experts of 5 modules: 78,000).
MAX_MODULES = 200_000
# Fields about the origin of files, the storage of weights or the generation of text: no plan depends on them.
LEFT_OUT = re.compile(
    r"auto_map|_?name_or_path|base_model_name_or_path|_commit_hash|custom_\w+|trust_remote_code|code_revision|revision"
    r"|configuration_files|quantization_config|compression_config|use_kernels|kernel_config|allow_all_kernels|gguf_file"
    r"|transformers_weights|generation_config|transformers_version|_from_\w+|adapter\w*|_configuration_file"
)
IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
# Fields that name a model to fetch.
FETCHED = ("backbone", "use_timm_backbone", "use_pretrained_backbone", "backbone_checkpoint", "vision_tower_name")
# The largest value of a number, by its name; the first pattern that matches counts. Lists of modules are built one by
# one.
LARGEST = (
    (re.compile(r"(^|_)ids?$|_token(_\w+)?$|theta|length|seed|initializer"), 1 << 62),
    (
        re.compile(
            r"vocab|position|embd|embeddings|bucket|window|ctx|context|seq|^d_|_size$|dim|width|channels|tokens|rate|samples"
        ),
        100_000_000,
    ),
    (re.compile(r"labels"), 1_000_000),
    (re.compile(r"experts"), 65_536),
    (re.compile(r"layer|block|depth|stage|group|repeat"), 4_096),
    (re.compile(r"(^|_)(num|n)_|heads"), 65_536),
)
_SIZES = re.compile(r"(^|_)(num|n)_|_size$|^d_|_dim$|layers|heads|experts|depth|^max_position|width")
_UNDEFINED = ("num_return_sequences", "num_beams", "num_beam_groups", "bos_token_id", "eos_token_id", "pad_token_id")


def load_config(path: Path) -> Any:
    """The configuration, of a class that transformers itself has. Raises :class:`OptionsError`."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise OptionsError(f"{path} is read by transformers, which is not installed") from error
    data = cleaned(_read(path), path)
    kind = data.pop("model_type", None)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise OptionsError(
            f"{str(path)!r} is not the configuration of a model that transformers has: its model_type is {kind!r}; for "
            "a model with code of its own give file.py:function, which returns (model, batch)"
        )
    with _closed(path):
        try:
            return CONFIG_MAPPING[kind].from_dict(data, use_cache=False)
        except OptionsError:
            raise
        except Exception as error:
            # A class of transformers may raise anything for a field that it does not expect.
            raise OptionsError(f"{str(path)!r} is not the configuration of a model: {first_line(error)}") from error


def model_of(config: Any, path: Path) -> nn.Module:
    """The language model of a configuration, on the meta device in fp32: one that predicts the next token, or one with
    an encoder and a decoder. Raises :class:`OptionsError`."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind: Any = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
    try:
        with torch.device("meta"), _closed(path), _few_modules(path):
            model: nn.Module = kind.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except OptionsError:
        raise
    except Exception as error:
        raise OptionsError(
            f"transformers cannot build a language model from {str(path)!r}: {first_line(error)}; for any other model "
            "give file.py:function, which returns (model, batch)"
        ) from error
    return model


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise OptionsError(f"there is no file {str(path)!r}")
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        data = json.loads(text) if len(text) <= MAX_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise OptionsError(f"{str(path)!r} is not the configuration of a model: {first_line(error)}") from error
    if not isinstance(data, dict):
        raise OptionsError(f"{str(path)!r} is not the configuration of a model: not a JSON object of at most 4 MiB")
    return data


def cleaned(data: Any, path: Path, key: str = "", depth: int = 0) -> Any:
    """``data`` without the fields that :data:`LEFT_OUT` matches. Raises :class:`OptionsError`, naming the field, for
    what would be fetched, and for numbers that no model has."""
    if depth > MAX_NESTING:
        raise OptionsError(f"{str(path)!r} is not the configuration of a model: {key!r} is nested too deeply")
    if isinstance(data, dict):
        fields = {}
        for name, value in data.items():
            _check_fetched(name, value, path)
            if not LEFT_OUT.fullmatch(name):
                fields[name] = cleaned(value, path, name, depth + 1)
        return fields
    if isinstance(data, list):
        return [cleaned(item, path, key, depth + 1) for item in data]
    if isinstance(data, (int, float)) and not isinstance(data, bool):
        _check_number(key, data, path)
    return data


def _check_fetched(name: str, value: Any, path: Path) -> None:
    plain = name.strip("_").removesuffix("_internal")
    allowed = IMPLEMENTATIONS.get(plain)
    named = list(value.values()) if isinstance(value, dict) else [value]
    if allowed and not all(item is None or (isinstance(item, str) and item in allowed) for item in named):
        raise OptionsError(
            f"{str(path)!r}: {name!r} is {value!r}, which names code outside of torch, as a file may not. Leave it "
            f"out, or write one of {', '.join(allowed)}"
        )
    if name in FETCHED and value:
        raise OptionsError(
            f"{str(path)!r}: {name!r} is {value!r}, a model to be fetched, which a file may not name. Give "
            "file.py:function, which returns (model, batch)"
        )


def _check_number(name: str, value: float, path: Path) -> None:
    most = next((most for pattern, most in LARGEST if pattern.search(name)), 1 << 62)
    least = 0 if _SIZES.search(name) and name not in _UNDEFINED else -(1 << 62)
    if not least <= value <= most:
        raise OptionsError(
            f"{str(path)!r}: {name!r} is {value!r}; no model has {'fewer than 0' if value < least else 'so many'}"
        )


@contextmanager
def _few_modules(path: Path) -> Iterator[None]:
    """Stops building a model that has too many modules, whichever numbers cause them."""
    count = 0

    def counted(module: nn.Module, name: str, part: nn.Module | None) -> None:
        nonlocal count
        count += 1
        if count > MAX_MODULES:
            raise OptionsError(f"{str(path)!r}: the model has more than {MAX_MODULES} modules; check its numbers")

    handle = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


_CLOSED: ContextVar[str] = ContextVar("_CLOSED", default="")
_NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request")
_HOOKED: list[bool] = []


def _refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _NETWORK and _CLOSED.get():
        raise OptionsError(f"{_CLOSED.get()!r} describes a model with parts to be fetched, which a file may not")


@contextmanager
def _closed(path: Path) -> Iterator[None]:
    """Refuses connections inside the ``with`` block, for what the checks of fields miss."""
    if not _HOOKED:
        # Audit hooks cannot be removed, but outside of this context ours does nothing.
        sys.addaudithook(_refuse_network)
        _HOOKED.append(True)
    token = _CLOSED.set(str(path))
    try:
        yield
    finally:
        _CLOSED.reset(token)


def first_line(error: Exception) -> str:
    """The first line of an error's message; some messages go on to list every class of transformers."""
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0].rstrip(".")[:300]
