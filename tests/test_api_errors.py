"""Bad input to the public face gets an error that says what to do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.arguments import check_names
from autopar.cluster.device import Device
from autopar.errors import OptionsError, TraceError
from tests.helpers.models import Plain, make, plain
from tests.helpers.planning import CLUSTER, on


def test_wrong_number_of_processes() -> None:
    with pytest.raises(
        OptionsError, match=r"the mesh \(2, 2\) has 4 devices, but 1 process is running; start 4 \(torchrun"
    ):
        autopar.parallelize(Plain(), (2, 2))

    def work(rank: int, world: int) -> None:
        with pytest.raises(OptionsError, match=r"the mesh \(4,\) has 4 devices, but 2 processes are running"):
            autopar.parallelize(Plain(), (4,))

    on(2, work)


def test_a_plan_in_the_place_of_a_mesh() -> None:
    plan = autopar.plan(Plain(), (1,), plain()[1], cluster=CLUSTER)
    with pytest.raises(OptionsError, match=r"^<Plan of Plain, .* a step> is not a mesh.* take a plan by name, plan="):
        autopar.verify(Plain(), plan, plain()[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("mesh", [(), (0, 2), "22", (2.0,), None], ids=str)
def test_what_is_no_mesh(mesh: Any) -> None:
    with pytest.raises(OptionsError, match="is not a mesh; give a DeviceMesh, or a shape"):
        autopar.plan(Plain(), mesh, plain()[1], cluster=CLUSTER)


def test_models_and_optimizers_of_another_kind() -> None:
    with pytest.raises(OptionsError, match=r"the model is the class Plain: give an instance of it, Plain\("):
        autopar.parallelize(Plain, (1,))  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match=r"the third argument is example_inputs.* options=autopar.Options\("):
        autopar.parallelize(Plain(), (1,), autopar.Options(zero=1))
    model = autopar.parallelize(Plain(), (1,))
    for optimizer in ("adamw", torch.optim.SGD(model.parameters(), lr=0.1)):
        with pytest.raises(OptionsError, match=r"give the class of an optimizer .*model.optimizer\(torch.optim.AdamW"):
            model.optimizer(optimizer)  # type: ignore[arg-type]


def test_options_plans_and_devices_of_another_kind() -> None:
    model, batch = plain()
    with pytest.raises(OptionsError, match=r"is not autopar.Options; give options=autopar.Options\("):
        autopar.plan(model, (2,), batch, options={"zero": 1})  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match=r"plan=5 is not an autopar.Plan; give one, or the path or URL"):
        autopar.parallelize(model, (1,), plan=5)  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match="device='gpu' is not a type of device"):
        autopar.plan(model, (2,), batch, device="gpu")
    with pytest.raises(OptionsError, match=r"looks like a path: autopar.Plan.load\('plan.json'\) reads"):
        autopar.Plan.from_json("plan.json")


def test_losses_batches_and_pins_that_are_none() -> None:
    model, batch = plain()
    with pytest.raises(OptionsError, match=r"loss_fn='mse' cannot be called; give a function of the output"):
        autopar.plan(model, (2,), batch, loss_fn="mse")  # type: ignore[arg-type]
    empty = tuple(tensor[:0] for tensor in batch)
    with pytest.raises(OptionsError, match=r"the batch is empty: .* give at least one row"):
        autopar.plan(model, (2,), empty)
    with pytest.raises(OptionsError, match="a stage can be pinned, but not excluded"):
        autopar.plan(model, (2,), batch, options=autopar.Options(pins={"*": "not stage 1"}))


@pytest.mark.parametrize(
    ("make", "wrong", "right"),
    [
        (autopar.Options, "zeor", "zero"),
        (autopar.Layout, "tensr", "tensor"),
        (autopar.Layout, "tp", "tensor"),
        (autopar.Layout, "pp", "pipeline"),
        (autopar.Options, "pp", "stages"),
        (Device, "memory_byte", "memory_bytes"),
    ],
)
def test_misspelt_options_are_suggested(make: Callable[..., Any], wrong: str, right: str) -> None:
    with pytest.raises(autopar.errors.ArgumentError, match=rf"has no argument {wrong!r}: did you mean {right}=\?") as e:
        make(**{wrong: 2})
    assert "given" not in str(e.value) and "from_layout" not in str(e.value), "are not the user's"
    assert right in inspect.signature(make).parameters


def test_the_version_is_the_wheels() -> None:
    assert autopar.__version__ == version("autopar")


def test_unknown_cluster() -> None:
    model, batch = plain()
    with pytest.raises(autopar.AutoparError, match=r"dgx-z900.*dgx-a100-80gb"):
        autopar.plan(model, (2,), batch, cluster="dgx-z900")


class Looping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while x.sum() > 1:
            x = self.inner(x)
        return x.sum()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Looping()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.block(x)
        return found


def test_a_data_dependent_loop_names_module_and_line() -> None:
    with pytest.raises(TraceError, match=r"(?s)block.*test_api_errors\.py:\d+"):
        autopar.plan(Outer(), (2,), torch.randn(4, 4), cluster=CLUSTER)


def test_a_meta_model_and_meta_batch_are_planned_without_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 16, 1 << 16), nn.Linear(1 << 16, 1 << 16))
    batch = torch.empty(1 << 12, 1 << 16, device="meta")
    plan = autopar.plan(model, (2, 2), batch, cluster=CLUSTER, loss_fn=lambda out: out.sum())
    assert plan.predicted.weight_bytes > 1 << 33


def test_an_argument_that_lacks_is_named() -> None:
    with pytest.raises(autopar.errors.ArgumentError, match=r"^parallelize: missing a required argument: 'mesh'; its"):
        autopar.parallelize(Plain())  # type: ignore[call-arg]


def test_a_slip_of_the_keys_is_suggested_beside_another_word() -> None:
    with pytest.raises(autopar.errors.ArgumentError, match=r"'stage': did you mean zero= or stages=\?"):
        autopar.Options(stage=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "given", "meant"),
    [
        (autopar.parallelize, "criterion", "loss_fn"),
        (autopar.parallelize, "batch", "example_inputs"),
        (autopar.parallelize, "config", "options"),
        (autopar.plan, "inputs", "batch"),
        (autopar.verify, "tolerence", "tolerance"),
        (autopar.Options, "memory", "memory_limit"),
    ],
)
def test_an_argument_that_is_not_there_names_the_one_that_is_meant(
    call: Callable[..., Any], given: str, meant: str
) -> None:
    # A TypeError too: that is what Python raises.
    for kind in (autopar.AutoparError, TypeError):
        with pytest.raises(kind, match=f"has no argument '{given}': did you mean {meant}="):
            call(**{given: None})


def test_an_evaluation_without_labels_comes_after_what_is_planned_from() -> None:
    def work(rank: int, world: int) -> None:
        model, batch = make("stack")
        assert isinstance(batch, dict)
        options = autopar.Options(stages=2, microbatches=2)
        parallel = autopar.parallelize(model, (2,), options=options, cluster=CLUSTER)
        ids = {name: value for name, value in batch.items() if name != "labels"}
        with torch.no_grad():
            with pytest.raises(
                OptionsError, match=r"(?s)the loss must be part.*first call of the model.*example_inputs="
            ):
                parallel.eval()(**ids)
            parallel.prepare((), batch, "loss")
            assert parallel(**ids) is not None

    on(2, work)


class AnyNames(nn.Module):
    """Takes inputs of any names, as many models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **others: object) -> torch.Tensor:
        result: torch.Tensor = self.up(x)
        return result


def test_an_input_that_forward_does_not_take_is_named_before_tracing() -> None:
    x = torch.randn(2, 4)
    with pytest.raises(OptionsError, match=r"an input 'label', which AnyNames.forward .*did you mean 'labels'\?"):
        autopar.plan(AnyNames(), (1,), {"x": x, "label": x})
    assert autopar.plan(AnyNames(), (1,), {"x": x, "weights": x}).batch == 2
    with pytest.raises(OptionsError, match=r"an input 'weights', which Linear.forward .*it takes 'input'"):
        autopar.plan(nn.Linear(4, 4), (1,), {"input": x, "weights": x})


def renames(forward: Any) -> Any:
    """A decorator that takes an older name of an input."""

    @functools.wraps(forward)
    def wrapped(self: nn.Module, *args: Any, image: Any = None, **others: Any) -> Any:
        return forward(self, *args, **({"x": image} if image is not None else {}), **others)

    return wrapped


class Renames(nn.Linear):
    @renames
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_inputs_that_decorators_and_hooks_take_are_no_errors() -> None:
    x = torch.randn(2, 4)
    assert autopar.plan(Renames(4, 4), (1,), {"image": x}).batch == 2
    model = nn.Linear(4, 4)
    model.register_forward_pre_hook(lambda _, args, kwargs: ((kwargs["image"],), {}), with_kwargs=True)
    assert autopar.plan(model, (1,), {"image": x}).batch == 2


def test_what_is_given_by_position_is_not_misspelt() -> None:
    x = torch.randn(2, 4)
    with pytest.raises(OptionsError, match=r"an input 'label', .*did you mean 'labels'\?"):
        check_names(AnyNames(), (x,), {"label": x})
    check_names(AnyNames(), (x, x), {"label": x})


class TypedTokens(nn.Module):
    def forward(self, x: torch.Tensor, mm_token_type_ids: torch.Tensor | None = None, **others: object) -> torch.Tensor:
        return x


def test_names_of_other_words_are_other_inputs() -> None:
    check_names(TypedTokens(), (), {"x": 0, "token_type_ids": 0})
    with pytest.raises(OptionsError, match=r"did you mean 'mm_token_type_ids'\?"):
        check_names(TypedTokens(), (), {"x": 0, "mm_token_type_id": 0})


class Decodes(nn.Module):
    def forward(
        self,
        input_ids: torch.Tensor,
        decoder_attention_mask: torch.Tensor | None = None,
        pixels_1: torch.Tensor | None = None,
        **others: object,
    ) -> torch.Tensor:
        return input_ids


@pytest.mark.parametrize("name", ["encoder_attention_mask", "pixels_2", "input_id_s", "decoder_mask"])
def test_similar_names_are_other_inputs(name: str) -> None:
    check_names(Decodes(), (), {"input_ids": 0, name: 0})


@pytest.mark.parametrize("name", ["decoder_atention_mask", "decoder_attention_maks", "decodr_attention_mask"])
def test_names_with_a_slip_are_misspelt(name: str) -> None:
    with pytest.raises(OptionsError, match=r"did you mean 'decoder_attention_mask'\?"):
        check_names(Decodes(), (), {"input_ids": 0, name: 0})


def test_a_training_plan_without_a_loss_says_so() -> None:
    x = torch.randn(2, 4)
    made = autopar.plan(nn.Linear(4, 4), (1,), (x,))
    assert any(each.startswith("the model returns no loss") for each in made.warnings)
    losses = autopar.plan(nn.Linear(4, 4), (1,), (x,), loss_fn=torch.sum)
    evaluated = autopar.plan(nn.Linear(4, 4), (1,), (x,), mode="inference")
    assert not any("loss" in each for each in (*losses.warnings, *evaluated.warnings))


def test_a_dotted_name_is_an_attribute_that_is_missing() -> None:
    """Not a module that cannot be imported, which hasattr would raise."""
    assert not hasattr(autopar, "options.Options")
    assert not hasattr(autopar, "nothing.here")
