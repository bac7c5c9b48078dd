"""A config.json is data: nothing it names is fetched or run, and no number in it keeps planning busy."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from pathlib import Path
from typing import Any

import pytest

from autopar.cli.model_config import load_config, model_of
from autopar.command_line import main
from autopar.errors import AutoparError, OptionsError

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 32,
    "bos_token_id": -1,
    "rope_theta": 10000.0,
}
CODE = "raise SystemExit('code from a file was run')\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a configuration lies beside code that it names; every connection is noted as a failure."""

    def refuse(*_: Any) -> None:
        pytest.fail("a connection was made")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in ("modeling_evil.py", "configuration_evil.py", "kernel.py"):
        (tmp_path / name).write_text(CODE)
    return tmp_path


def _write(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**TINY, **fields}))
    return path


def _make(path: Path) -> Any:
    return model_of(load_config(path), path)


@pytest.mark.parametrize(
    "fields",
    [
        {"_attn_implementation": "org/x"},
        {"attn_implementation": "org/x@main:kernel"},
        {"_attn_implementation_internal": "org/x"},
        {"attn_implementation": {"": "org/x"}},
        {"attn_implementation": "flash_attention_2"},
        {"experts_implementation": "org/x"},
        {"text_config": {"attn_implementation": "org/x"}},
        {"backbone": "resnet50", "use_timm_backbone": True},
        {"model_type": "evil"},
        {"model_type": ["llama"]},
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**12},
        {"hidden_size": -16},
        {"vocab_size": -1},
        {"num_labels": 10**9},
        {"num_hidden_layers": 1e300},
        {"num_hidden_layers": float("nan")},
    ],
)
@pytest.mark.timeout(120)
def test_what_would_be_fetched_and_absurd_numbers_are_refused_by_name(folder: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(OptionsError, match=r"config\.json"):
        _make(_write(folder, **fields))


def test_what_only_says_where_code_comes_from_is_left_out(folder: Path) -> None:
    path = _write(
        folder,
        auto_map={"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "org/x--modeling_evil.M"},
        custom_generate="org/x",
        use_kernels=True,
        quantization_config={"quant_method": "org/x"},
        _name_or_path="org/x",
        trust_remote_code=True,
    )
    model = _make(path)
    assert type(model).__name__ == "LlamaForCausalLM" and not hasattr(model.config, "auto_map")


def test_a_model_type_that_fetches_is_stopped_at_the_connection(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig

    monkeypatch.setattr(LlamaConfig, "from_dict", lambda *_, **__: socket.getaddrinfo("localhost", 80))
    with pytest.raises(OptionsError, match="fetched"):
        load_config(_write(folder))
    assert socket.getaddrinfo("127.0.0.1", 80)  # And only there.


def test_the_command_refuses_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(folder, _attn_implementation="org/x")
    assert main(["plan", str(path), "--devices", "2", "--batch", "2"]) == 2
    assert "org/x" in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_random_configurations_make_a_model_or_a_message(folder: Path) -> None:
    draw = random.Random(0)
    values = [None, True, -1, 0, 3, 2**70, 1e9, "org/x", "sdpa", [], [1, "a"], {}, {"": "org/x"}, {"factor": 1e30}]
    keys = [*TINY, "attn_implementation", "auto_map", "rope_parameters", "layer_types", "id2label", "dtype", "head_dim"]
    made = 0
    for _ in range(150):
        fields = {draw.choice(keys): draw.choice(values) for _ in range(draw.randint(1, 2))}
        with contextlib.suppress(AutoparError):
            made += bool(_make(_write(folder, **fields)))
    assert made
