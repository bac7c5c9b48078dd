"""``autopar plan --devices``: the plan of a model, beside others and named layouts, and what training takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers as hf

import autopar
from autopar.command_line import main, make_parser
from autopar.errors import OptionsError
from autopar.layout import Layout
from autopar.options import CHOICES as OPTION_CHOICES
from autopar.plans.views.quantities import size
from benchmarks.recipes import Recipe

MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(128, 64), nn.Linear(64, 128)
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

def make():
    return Model(), (torch.zeros(16, 32, dtype=torch.long),)
"""
WORDS = ("--devices", "4", "--cluster", "dgx-a100-80gb")


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "deep.py"
    path.write_text(MODEL)
    return f"{path}:make"


@pytest.mark.slow
def test_layouts_are_compared(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--batch", "32", "--tokens", "1e9", "--compare", "tensor=2 data=2 recompute=full zero=1")
    assert main(["plan", target, *WORDS, *words]) == 0
    said = capsys.readouterr().out
    assert "on 4 devices of dgx-a100-80gb, batches of 32" in said and "checkpoint:" in said
    assert "tensor=2 data=2 microbatch=1 recompute=full zero=1" in said and "prices: NVIDIA A100 data sheet" in said
    (first,) = (line for line in said.splitlines() if line.startswith("1 "))
    _, _, _, flops, _, days, *_ = first.split()
    assert float(flops) > 0 and float(days) > 0, "small figures have digits"


@pytest.mark.slow
def test_fields_of_recipes_are_named_where_they_are_priced(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", target, *WORDS, "--batch", "32", "--compare", "data=2 pipeline=2 tail=1"]) == 2
    assert "Recipe(head_as_layers=...)" in capsys.readouterr().err


def test_layouts_as_json(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", target, *WORDS, "--tokens", "1e9", "--compare", "data=4", "--meta", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best, given = found["layouts"][0], found["given"]
    assert best["step_seconds"] <= given["step_seconds"] * (1 + found["placement_gap"])
    assert best["days"] == pytest.approx(1e9 / (16 * 32) * best["step_seconds"] / 86400)
    assert found["checkpoint_bytes"] == 12 * found["parameters"]
    assert found["placement_gap"] <= 0.01 and found["planning_cpu_seconds"] > 0 and found["searched"] is None
    parts = ("weight", "gradient", "optimizer", "activation", "temporary", "input")
    assert sum(best[f"{part}_bytes"] for part in parts) == best["peak_bytes"]


def test_the_plan_of_a_table_is_a_plan(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is restricted by the options of plans, shown and written as any."""
    path, page = tmp_path / "plan.json", tmp_path / "plan.html"
    words = ("--layout", "data=4", "--zero", "1", "--output", str(path), "--html", str(page), "--show", "kind")
    assert main(["plan", target, *WORDS, *words]) == 0
    plan = autopar.Plan.load(path)
    assert (plan.layout, plan.precision, plan.stages) == ("data=4", "bf16", 1) and page.is_file()
    assert str(plan.table(by="kind")) in capsys.readouterr().out


@pytest.mark.slow
def test_a_configuration_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    config = hf.MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, architectures=["MixtralForCausalLM"],
    )  # fmt: skip
    path.write_text(config.to_json_string())
    assert (
        main(["plan", str(path), "--devices", "2", "--cluster", "dgx-a100-80gb", "--batch", "8", "--sequence", "64"])
        == 0
    )
    said = capsys.readouterr().out
    assert "MixtralForCausalLM" in said
    elements = sum(parameter.numel() for parameter in hf.MixtralForCausalLM(config).parameters())
    assert f"checkpoint: {size(12 * elements)} (weights and the state of adamw)" in said, "masters in fp32"
    assert main(["plan", str(path), *WORDS]) == 2
    assert "give --batch" in capsys.readouterr().err


def refusal(config: hf.PretrainedConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said of a configuration that cannot be planned."""
    path = tmp_path / "config.json"
    path.write_text(config.to_json_string())
    assert main(["plan", str(path), *WORDS, "--batch", "8", *words]) == 2
    return capsys.readouterr().err


def test_configurations_that_cannot_be_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is refused in a line that says what would do."""
    said = refusal(hf.GPT2Config(n_positions=64), tmp_path, capsys, "--sequence", "65")
    assert "--sequence 65: the model has 64 positions" in said
    said = refusal(hf.ViTConfig(), tmp_path, capsys)
    assert "cannot build a language model" in said and "give file.py:function" in said and len(said) < 500
    said = refusal(hf.GPT2Config(n_embd=65), tmp_path, capsys)
    assert "cannot build a language model" in said and "divisible by num_heads" in said


@pytest.mark.slow
def test_an_encoder_and_decoder_by_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With as many tokens as it has positions, where these are fewer than usual."""
    config = hf.BartConfig(
        vocab_size=128, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=32,
    )  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(config.to_json_string())
    words = ("--devices", "1", "--cluster", "dgx-h100", "--batch", "2", "--tokens", "64e6", "--json")
    assert main(["plan", str(path), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["layouts"][0]
    assert found["model"] == "BartForConditionalGeneration"
    assert best["days"] == pytest.approx(64e6 / (2 * 32) * best["step_seconds"] / 86400)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--no-mesh-search",), "--no-mesh-search is for plans with --mesh"),
        (("--compare", "data=8"), "takes 8 devices, not 4; data=4 would take 4"),
        (("--compare", "tensor=2"), "takes 2 devices, not 4; data=2 would take 4"),
        (("--compare", "tensor=3 pipeline=2"), "takes 6 devices, not 4; tensor=2 would take 4"),
        (("--output", "missing/plan.json"), "there is no folder 'missing'"),
        (("--html", "."), "it is a folder"),
        (("--tokens", "-5"), "tokens=-5.0: not a positive number"),
        (("--compare", "colour=8"), "'colour=8' in a layout"),
        pytest.param(("--memory-limit", "1KiB"), "fits into 1 KiB per device", marks=pytest.mark.slow),
    ],
)
def test_what_makes_no_sense_is_said(
    words: tuple[str, ...], said: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", target, *WORDS, *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--batch", "8"), ("--tokens", "1e9"), ("--compare", "data=8")])
def test_what_only_layouts_have(words: tuple[str, ...], target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", target, "--mesh", "2", *words]) == 2
    assert f"{words[0]} is for plans with --devices" in capsys.readouterr().err


def test_a_mesh_or_devices(target: str) -> None:
    with pytest.raises(SystemExit):
        main(["plan", target, *WORDS, "--mesh", "2,2"])


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(8, 16, 8, expert=4, recompute="full", sequence_parallel=True, zero=1, schedule="gpipe"),
        Recipe(overlap=(), eager=("*loss*", "*norm*"), capacity=1.25, precision="fp8", scatter=False),
    ],
)
def test_layouts_are_read_as_they_are_written(layout: Layout) -> None:
    assert type(layout).parse(str(layout)) == layout


@pytest.mark.parametrize("text", ["tensor=two", "tensor", "offload=perhaps", "zero=7"])
def test_layouts_that_are_none(text: str) -> None:
    with pytest.raises(OptionsError):
        Layout.parse(text)


def test_the_command_line_chooses_among_what_options_take(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every value of the API can be said; what no plan recomputes is refused before anything is planned."""
    for name in ("precision", "recompute", "zero"):
        for value in OPTION_CHOICES[name]:
            for words in (["plan", target, *WORDS], ["verify", target, "--mesh", "2"]):
                assert getattr(make_parser().parse_args([*words, f"--{name}", str(value)]), name) == value
    with pytest.raises(SystemExit):
        main(["plan", target, *WORDS, "--recompute", "elementwise"])
    assert "invalid choice: 'elementwise'" in capsys.readouterr().err
