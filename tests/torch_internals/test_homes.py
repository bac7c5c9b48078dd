"""The private parts that the homes rely on are there and do what is said: where a new torch breaks one, this names the
function to mend."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

import autopar.runtime.torch_internals
import autopar.torch_internals
from autopar.runtime import mesh_of_one
from autopar.runtime.torch_internals import dtensors, hooks, tensor_lists
from autopar.torch_internals import fake_tensors, joint_graphs, modes, modules, operators, replacements, tensors
from autopar.torch_internals.sharding_rules import fake_mesh, rule_of, rule_of_one_axis, strategy_function_of
from autopar.torch_internals.size_nodes import node_of

ADD = torch.ops.aten.add_.Tensor


def homes() -> Iterator[ModuleType]:
    for package in (autopar.torch_internals, autopar.runtime.torch_internals):
        for found in pkgutil.iter_modules(package.__path__):
            yield importlib.import_module(f"{package.__name__}.{found.name}")


def functions(home: ModuleType) -> Iterator[tuple[str, str]]:
    """Public functions of ``home`` with their docstrings."""
    for name, value in vars(home).items():
        if inspect.isfunction(value) and value.__module__ == home.__name__ and not name.startswith("_"):
            yield f"{home.__name__}.{name}", " ".join((inspect.getdoc(value) or "").split())


def test_each_function_says_what_it_relies_on_and_since_when() -> None:
    silent = [name for home in homes() for name, says in functions(home) if "Relies on" not in says or "(" not in says]
    assert silent == []


def test_operators() -> None:
    assert operators.is_mutable(ADD) and operators.overload_name(ADD) == "Tensor"
    assert [argument.name for argument in operators.schema_of(ADD).arguments] == ["self", "other", "alpha"]
    assert "aten::add_.Tensor" in operators.registered_names()
    assert operators.safe_softmax(torch.full((1, 2), -torch.inf), -1).tolist() == [[0, 0]]


def test_a_kernel_in_place_of_autograds() -> None:
    before = operators.autograd_kernel(ADD)
    operators.set_autograd_kernel(ADD, torch.add)
    assert operators.autograd_kernel(ADD) is torch.add
    operators.set_autograd_kernel(ADD, before)
    assert operators.autograd_kernel(ADD) is before


def test_modes() -> None:
    class Counting(modes.TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.count += 1
            return func(*args, **(kwargs or {}))

    assert not modes.is_any_mode_active()
    with Counting() as counting:
        assert modes.is_any_mode_active()
        torch.ones(1)
        with modes.without_dispatch_modes():
            torch.ones(1)
    assert counting.count == 1


def test_tables_of_modules() -> None:
    inner, outer = nn.Linear(1, 1, bias=False), nn.Module()
    outer.inner = inner
    outer.register_buffer("kept", torch.ones(1))
    outer.register_buffer("lost", None, persistent=False)
    assert list(modules.parameters_of(inner)) == ["weight", "bias"] and modules.parameters_of(inner)["bias"] is None
    assert list(modules.buffers_of(outer)) == ["kept", "lost"]
    assert [modules.is_persistent(outer, name) for name in ("kept", "lost")] == [True, False]
    copied = modules.blank_copy(outer)
    modules.set_children(copied, {"other": inner})
    assert list(copied.children()) == [inner] and list(modules.children_of(outer)) == ["inner"]
    assert all(table in vars(outer) for table in (*modules.STATE, *modules.STATE_DICT_HOOKS))


def test_recurrent_layers_list_their_parameters() -> None:
    layer = nn.RNN(1, 1, bias=False)
    assert all(map(modules.is_about_flat_weights, [layer] * 2, ("_flat_weights", "_flat_weights_names")))
    before, layer.weight_ih_l0 = modules.flat_weights_of(layer), nn.Parameter(torch.ones(1, 1))
    modules.renew_flat_weights(layer)
    assert modules.flat_weights_of(layer)[0] is layer.weight_ih_l0
    modules.set_flat_weights(layer, before)
    assert modules.flat_weights_of(layer) is before


def test_tensors() -> None:
    tensor = torch.ones(2)
    assert tensors.is_view(tensor[:1]) and not tensors.is_view(tensor)
    assert tensors.storage_key(tensor[:1].untyped_storage()) == tensors.storage_key(tensor.untyped_storage())
    before = tensors.counted_writes(tensor)
    assert tensors.counted_writes(tensor.add_(1)) == before + 1


def test_hooks_of_tensors() -> None:
    parameter, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    assert tensors.gradient_hooks(parameter) is None and tensors.accumulation_hooks(parameter) is None
    handles = [parameter.register_hook(print), parameter.register_post_accumulate_grad_hook(print)]
    found = tensors.gradient_hooks(parameter), tensors.accumulation_hooks(parameter)
    assert all(table is not None and list(table.values()) == [print] for table in found)
    hooks.set_gradient_hooks(other, found[0] or {})
    hooks.set_accumulation_hooks(other, found[1] or {})
    for handle in handles:
        handle.remove()
    assert not tensors.gradient_hooks(other) and not tensors.accumulation_hooks(other)


@pytest.mark.parametrize("kind", hooks.KINDS)
def test_hooks_of_modules(kind: str) -> None:
    source, target, method = nn.Module(), nn.Module(), f"register{kind.replace('backward_h', 'full_backward_h')[:-1]}"
    handle = getattr(source, method.replace("backward_pre", "full_backward_pre"))(print)
    assert hooks.have_hooks([source]) and list(hooks.module_hooks(source, kind).values()) == [print]
    hooks.move_hooks(source, target, kind, type(hooks.module_hooks(source, kind))())
    hooks.move_hook_settings(source, target)
    assert hooks.have_hooks([target]) and not hooks.have_hooks([source])
    handle.remove()
    assert not hooks.have_hooks([target]) and kind in hooks.hook_tables(target)
    assert list(hooks.hooks_on_all_modules(kind)) == []


def test_symbolic_sizes() -> None:
    environment = fake_tensors.shape_environment()
    size = fake_tensors.new_symbol(environment, "batch", 13)
    assert fake_tensors.hint_of(size) == 13 and fake_tensors.expression_of(size).is_Symbol
    assert size > 12 and len(list(fake_tensors.conditions(environment))) == 1
    assert node_of(size) is size.node


def test_joint_graphs() -> None:
    mode = fake_tensors.FakeTensorMode()
    with mode:
        model, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    with joint_graphs.preserve_node_meta():
        joint_graphs.set_notes({"place": 1})
        graph = joint_graphs.export_joint(mode, model, [x], {}).graph
        assert joint_graphs.notes() == {"place": 1}
        joint_graphs.set_notes(None)
    inputs = [joint_graphs.descriptor_of(node) for node in graph.nodes if node.op == "placeholder"]
    kinds = (joint_graphs.ParamAOTInput, joint_graphs.PlainAOTInput, joint_graphs.TangentAOTInput)
    assert tuple(map(type, inputs)) == kinds
    results = joint_graphs.described_outputs(next(iter(reversed(graph.nodes))))
    assert [type(found) for _, found in results][:2] == [joint_graphs.PlainAOTOutput, joint_graphs.GradAOTOutput]
    products = [node for node in graph.nodes if node.op == "call_function"]
    assert all(isinstance(joint_graphs.value_of(node), fake_tensors.FakeTensor) for node in products)
    assert {"place": 1} in [joint_graphs.notes_of(node) for node in products]


def test_replacements() -> None:
    before = torch.backends.mkldnn.enabled
    with replacements.exporting(), replacements.without_mkldnn(), replacements.without_distribution_checks():
        assert torch.compiler.is_compiling() and torch.compiler.is_exporting() and not torch.backends.mkldnn.enabled
        torch.distributions.Normal(torch.zeros(1), -torch.ones(1))
    assert not torch.compiler.is_compiling() and torch.backends.mkldnn.enabled == before


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_replaced(reentrant: bool) -> None:
    told = []

    def around(*_args: object, **_kwargs: object) -> Iterator[None]:
        told.append("around")
        yield

    with replacements.checkpoint_replaced(lambda function, _preserve, *args: told.append("call"), around):
        checkpoint(torch.sin, torch.ones(1), use_reentrant=reentrant)
    assert told == ["call" if reentrant else "around"]


def test_dtensors() -> None:
    mesh = mesh_of_one()
    made = dtensors.dtensor(torch.ones(2, 3), mesh, (Replicate(),), (2, 3), (3, 1))
    assert isinstance(made, DTensor) and made.shape == (2, 3) and made.placements == (Replicate(),)
    assert dtensors.local_tensor(dtensors.dtensor_like(torch.zeros(2, 3), made)).sum() == 0
    assert repr(dtensors.strided_shard(0, 2)) != repr(dtensors.strided_shard(0, 3))
    assert fake_mesh(4).size() == 4


def test_registries_of_sharding_rules() -> None:
    finders = (rule_of_one_axis, strategy_function_of, rule_of)
    assert any(find(torch.ops.aten.mm.default) for find in finders)
    assert not any(find(torch.ops.autopar.experts.default) for find in finders)


def test_lists_of_tensors() -> None:
    listed = [torch.ones(4), torch.ones(9)]
    tensor_lists.multiply_in_place(listed, 2.0)
    assert [float(norm) for norm in tensor_lists.each_norm(listed, 2.0)] == [4, 6]
    assert tensor_lists.changes_list(torch._foreach_mul_) and not tensor_lists.changes_list(tensor_lists.FOREACH_NORM)
