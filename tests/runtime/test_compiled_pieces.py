"""Compiled sections: the numbers of one device, each piece compiled once, and what runs if it cannot be."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Options
from autopar.ir.program import Section
from autopar.ops.index_range import take_out_of_range
from autopar.runtime.execute import compiled_pieces
from autopar.runtime.execute.compiled_pieces import Compilation, PieceCall, code_of, with_pieces
from autopar.runtime.execute.index_guards import GUARDED
from autopar.runtime.execute.pieces import split
from autopar.runtime.execute.section_code import Run, compile_section
from autopar.runtime.torch_internals.inductor import Metadata, compile_function
from tests.helpers.planning import CLUSTER, on, slow_devices
from tests.passes.test_cut import _make

COMPILED = Options(compile=True)
CPU = torch.device("cpu")
SECTION = Section.from_text(
    """
    forward(%x, %y):
      %sin = aten.sin.default(%x)  @net.act
      %add = aten.add.Tensor(%sin, %y)  @net
      return %add, %sin
    """
)


class Layers(nn.Module):
    """Equal layers, a tied weight, an odd width."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.GELU(), nn.LayerNorm(7)) for _ in range(depth))
        self.layers[0][0].weight = self.layers[-1][0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def call_of(section: Section) -> tuple[PieceCall, Compilation]:
    (piece,) = split(section).pieces.values()
    compilation = Compilation(CPU)
    return PieceCall(piece, CPU, lambda each: compile_section(each, {}, CPU, "this rank"), compilation), compilation


def eager(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [x.sin(), x.sin() + y]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Metadata, ...]]:
    """What is compiled, instead of compiling it."""
    seen: list[tuple[Metadata, ...]] = []

    def compile_function(function: Any, inputs: tuple[Metadata, ...]) -> Any:
        seen.append(inputs)
        return function

    monkeypatch.setattr(compiled_pieces, "compile_function", compile_function)
    return seen


def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs pieces as functions of ATen operations, after a first run on tensors without numbers, as in a trace."""

    def compile_function(function: Any, inputs: tuple[Metadata, ...]) -> Any:
        function([torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype, _ in inputs])
        # The code just traced is the last one.
        return compile_section(list(compiled_pieces._CODE.values())[-1]._canonical, {}, CPU)

    monkeypatch.setattr(compiled_pieces, "compile_function", compile_function)


def test_code_for_each_size_and_layout_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch)
    call, compilation = call_of(SECTION)
    other, _ = call_of(SECTION)
    square = torch.randn(4, 4)
    for values in ((square, square), (square.t(), square), (square, square)):
        torch.testing.assert_close(list(call(list(values))), eager(*values))
        torch.testing.assert_close(list(other(list(values))), eager(*values))
    assert [inputs[0][1] for inputs in seen] == [(4, 1), (1, 4)]
    for size in range(10, 20):
        x = torch.randn(size)
        torch.testing.assert_close(list(call([x, x])), eager(x, x))
    assert len(seen) == 8
    (problem,) = compilation.problems
    assert "2 operations from aten.sin.default of module net.act on run uncompiled" in problem


def test_inputs_are_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    counted(monkeypatch)
    call, _ = call_of(SECTION)
    inputs = [torch.randn(3), torch.randn(3)]
    call(inputs)
    call(inputs := [torch.randn(3), torch.randn(3)])
    assert inputs == []


def test_what_cannot_be_compiled_runs_and_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(function: Any, inputs: Any) -> Any:
        raise RuntimeError("no such lowering\nand more")

    monkeypatch.setattr(compiled_pieces, "compile_function", refuses)
    call, compilation = call_of(Section.from_text(SECTION.to_text().replace("sin", "cos")))
    for _ in range(2):
        x = torch.randn(5)
        torch.testing.assert_close(list(call([x, x])), [x.cos(), x.cos() + x])
    (problem,) = compilation.problems
    assert problem.endswith("RuntimeError: no such lowering")
    plan = replace(autopar.plan(nn.Linear(2, 2), (1,), (torch.ones(1, 2),), loss_fn=torch.sum), warnings=("one",))
    assert compilation.noted_in(plan).warnings == ("one", problem)
    assert "2 operations from aten.cos.default of module net.act" in str(compilation.noted_in(plan))


def test_a_cause_of_many_pieces_is_one_problem(caplog: pytest.LogCaptureFixture) -> None:
    compilation = Compilation(CPU)
    for piece, cause in (("1", "no lowering"), ("2", "no lowering"), ("2", "no lowering"), ("3", "too large")):
        compilation.report(f"{piece} operations from aten.sin.default on", cause)
    assert compilation.problems == (
        "1 operations from aten.sin.default on, and 1 other piece, run uncompiled: no lowering",
        "3 operations from aten.sin.default on run uncompiled: too large",
    )
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.rpartition(": ")[2] for text in logged] == ["no lowering", "too large"]


def test_an_error_names_the_module() -> None:
    call, compilation = call_of(SECTION)
    with pytest.raises(autopar.AutoparError, match=r"module net\n.*aten.add.Tensor") as raised:
        call([torch.randn(4), torch.randn(3)])
    assert "f32[3]" in str(raised.value) and "compiled" not in str(raised.value)
    assert not compilation.problems


def test_an_index_out_of_range_is_noted_and_gives_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    traced(monkeypatch)
    section = Section.from_text(
        """
        forward(%x, %index):
          %sin = aten.sin.default(%x)
          %gather = aten.gather.default(%sin, 1, %index)
          return %gather
        """
    )
    compilation = Compilation(CPU)

    def as_it_is(piece: Section) -> Run:
        return compile_section(piece, GUARDED, CPU)

    _, operations = with_pieces(section, GUARDED, as_it_is, compilation)
    x, call = torch.randn(2, 3), operations["forward_piece_0"]
    inside, outside = torch.tensor([[0], [2]]), torch.tensor([[0], [3]])
    torch.testing.assert_close(list(call([x, inside])), [x.sin().gather(1, inside)])
    assert not take_out_of_range()
    assert bool(call([x, outside])[0].isnan().all())
    assert [(each.value, each.high) for each in take_out_of_range()] == [(3, 3)]
    assert not compilation.problems


def test_code_is_found_in_the_cache_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without generating it a second time, which takes longer than all else of a start."""
    from torch._dynamo.utils import counters

    def scaled_sine(values: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.ops.aten.mul.Tensor(torch.ops.aten.sin.default(values[0]), 0.37)]

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, found = torch.randn(6, 5), []
    for _ in range(2):
        before = counters["inductor"]["fxgraph_cache_hit"]
        run = compile_function(scaled_sine, [((6, 5), (5, 1), torch.float32, CPU)])
        found.append(counters["inductor"]["fxgraph_cache_hit"] - before)
        torch.testing.assert_close(run([x])[0], x.sin() * 0.37)
    assert found == [0, 1]


def test_equal_pieces_share_code() -> None:
    first, second = (split(SECTION).pieces["forward_piece_0"].canonical for _ in range(2))
    code = code_of(first, CPU)
    assert code_of(second, CPU) is code


@pytest.mark.parametrize("value", ["always", 1, None])
def test_a_wrong_option_is_refused(value: Any) -> None:
    with pytest.raises(autopar.OptionsError, match="compile="):
        Options(compile=value)


def test_plans_are_priced_accordingly() -> None:
    auto, compiled, plain = [
        autopar.plan(nn.Linear(4, 4), (2,), (torch.ones(4, 4),), loss_fn=torch.sum, options=Options(compile=how))
        for how in ("auto", True, False)
    ]
    assert auto == plain
    assert compiled.graph_hash == plain.graph_hash
    assert compiled.predicted.compute_seconds < plain.predicted.compute_seconds


def test_without_a_compiler_it_warns_and_runs() -> None:
    def work(rank: int, world: int) -> tuple[str, float]:
        os.environ["PATH"] = "/nowhere"
        os.environ.pop("CXX", None)
        net, x = Layers(2), torch.randn(3, 7)
        expected = float(net(x).detach())
        with pytest.warns(UserWarning, match="there is no C\\+\\+ compiler.*uncompiled") as warned:
            model = autopar.parallelize(net, (1,), options=COMPILED)
        assert len(warned) == 1
        return str(warned[0].message), abs(float(model(x).detach()) - expected)

    ((_, error),) = on(1, work)
    assert error < 1e-6


def train(ranks: int, make: Any, mesh: tuple[int, ...], **arguments: Any) -> list[dict[str, Any]]:
    """Two steps on ``ranks`` processes against one device: the largest relative difference, and what was compiled."""

    def work(rank: int, world: int) -> dict[str, Any]:
        net, batch = make()
        reference = copy.deepcopy(net)
        model = autopar.parallelize(net, mesh, options=COMPILED, **arguments)
        worst = 0.0
        for _ in range(2):
            found, wanted = model(*batch), reference(*batch)
            found.backward()
            wanted.backward()
            worst = max(worst, abs(float((found / wanted).detach()) - 1))
        for name, parameter in reference.named_parameters():
            gradient = model.full_tensor(model.get_parameter(name).grad)
            worst = max(worst, float((gradient - parameter.grad).abs().max() / parameter.grad.abs().max()))
        return {
            "error": worst,
            "warnings": model.plan.warnings,
            "pieces": sum(len(code._variants) for code in compiled_pieces._CODE.values()),
        }

    return on(ranks, work, timeout=500)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mesh"), [(1, (1,)), (4, (2, 2))])
def test_equal_to_one_device_and_compiled_once_whatever_the_depth(ranks: int, mesh: tuple[int, ...]) -> None:
    counts = []
    for depth in (3, 6):
        found = train(ranks, lambda depth=depth: (Layers(depth), (torch.randn(8, 7),)), mesh, cluster=slow_devices())
        assert all(each["error"] < 1e-5 and not each["warnings"] for each in found), found
        counts.append(found[0]["pieces"])
    assert counts[0] == counts[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt2", (1,), {}),
        ("gpt2", (2, 2), {"zero": 3}),
        ("llama", (2, 2), {}),
        ("llama", (2,), {"stages": 1, "microbatches": 5}),
        ("gpt2", (2, 2), {"stages": 2, "microbatches": 4, "schedule": "1f1b"}),
        ("gpt2", (2,), {"recompute": "full", "stages": 1}),
        ("unet", (2,), {"stages": 2, "microbatches": 2, "schedule": "zb-v"}),
    ],
)
def test_models(name: str, mesh: tuple[int, ...], options: dict[str, Any], precision: Any) -> None:
    model, batch = _make(name)
    given = Options(compile=True, precision=precision, **options)
    report = autopar.verify(model, mesh, batch, options=given, cluster=CLUSTER, timeout=900)
    assert report.ok, str(report)
    assert report.gradient_errors


class Blocks(nn.Module):
    """Blocks of convolutions that end in another operation, a pooling, and a feature map as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=bias), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(3, 1, 1))
            for bias in (True, False, True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.slow
def test_convolutions_keep_their_layout_from_block_to_block_and_outputs_do_not() -> None:
    def work(rank: int, world: int) -> dict[str, Any]:
        net, x = Blocks(), torch.randn(4, 3, 9, 7)
        reference = copy.deepcopy(net)
        model = autopar.parallelize(net, (1,), options=COMPILED)
        found, wanted = model(x), reference(x)
        for output in (found, wanted):
            output.view(4, -1).square().mean().backward()
        both = zip(model.parameters(), reference.parameters(), strict=True)
        pairs = [(model.full_tensor(p.grad), q.grad) for p, q in both]
        saved = [size for code in compiled_pieces._CODE.values() for v in code._variants.values() for size in v.sizes]
        # Biases in front of a batch norm have gradients of nothing but rounding.
        largest = max(float(b.abs().max()) for _, b in pairs)
        return {
            "error": max(float((a - b).abs().max()) for a, b in pairs) / largest,
            "outputs": float((found - wanted).detach().abs().max()),
            "strides": all(a.stride() == b.stride() for a, b in pairs),
            "channels last": sum(stride == (189, 1, 21, 3) for _, stride in saved),
            "contiguous": sum(stride == (189, 63, 7, 1) for _, stride in saved),
        }

    (found,) = on(1, work, timeout=500)
    assert found["error"] < 1e-4 and found["outputs"] < 1e-5 and found["strides"], found
    assert found["channels last"] > found["contiguous"], found
