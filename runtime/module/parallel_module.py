"""The parallel module: has the interface of the original model, and runs compiled programs on the mesh."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import AutoparError
from autopar.ir.pipeline_program import PipelineProgram
from autopar.runtime.calls.autograd import differentiate
from autopar.runtime.calls.call import Call
from autopar.runtime.calls.compiled import Compile, OutputsWanted, Request
from autopar.runtime.calls.input_checks import Check, CheckedCall, InputChecks
from autopar.runtime.calls.kind import CallKind, Leaf, kind_of, name_of, named_leaves
from autopar.runtime.calls.local_batch import as_parts
from autopar.runtime.calls.module_hooks import before_step, check_hooks, hooks_inside, take_over
from autopar.runtime.calls.padding import cut_of, filled
from autopar.runtime.calls.pipeline_autograd import differentiate_stepped
from autopar.runtime.calls.pipeline_call import PipelineCall
from autopar.runtime.calls.programs import AnyCall, ProgramLine, Programs
from autopar.runtime.comm.exchange import Exchange
from autopar.runtime.comm.groups import MeshGroups, mesh_groups
from autopar.runtime.comm.plan_agreement import check_agreement
from autopar.runtime.execute.compiled_pieces import Compilation
from autopar.runtime.execute.randomness import RandomState
from autopar.runtime.faults.watch import Watch
from autopar.runtime.pipeline.stage_mesh import whole_everywhere
from autopar.runtime.state.gradient_norm import clip, gradients_of, total_norm
from autopar.runtime.state.loss_scale import LossScale, watch_optimizers, watch_zero_grad
from autopar.runtime.state.optimizer import make_optimizer
from autopar.runtime.state.param_groups import ParamGroups
from autopar.runtime.state.parameters import shared_seed
from autopar.runtime.state.weights import Weights
from autopar.runtime.torch_internals.hooks import hook_tables
from autopar.schedule.timeline import Timeline
from autopar.torch_internals.modules import STATE, STATE_DICT_HOOKS
from autopar.torch_internals.trees import tree_flatten, tree_unflatten

from .carried_state import CarriedState
from .copies import compile_for, copied_module
from .delegation import Delegating
from .loss_factor import step_scale
from .own_samples import OwnSamples, check_one_form
from .parts import Parts
from .step_loss import differentiated
from .unwrapped import check_plain
from .value_checks import BackwardCheck, ValueChecks, checked_step
from .watched import watched


@watched
class ParallelModule(OwnSamples, CarriedState, Delegating):
    """``module`` on ``mesh``: same inputs, outputs, parameter names, tied weights and ``state_dict`` keys.

    ``compile`` turns a :class:`Request` into a program for each new kind of call (other shapes, training or not, with
    gradients or not). The first one also places the parameters, as DTensors and in place. Every rank passes the same
    global batch, of which it takes its part, or DTensors. ``seed`` (default: torch's initial seed on rank 0) determines
    the model's random numbers (dropout, noise) and the initialisation of a meta model; a real model keeps rank 0's
    weights. ``scaled``: whether gradients are computed from a scaled loss (:mod:`autopar.runtime.state.loss_scale`).
    ``check_inputs``: when ranks compare their inputs (:mod:`autopar.runtime.calls.input_checks`). ``watch``: names
    faults of other ranks (:mod:`autopar.runtime.faults.watch`). ``compilation``: given if pieces of programs are
    compiled (:mod:`autopar.runtime.execute.compiled_pieces`). ``values``: the checks of :mod:`.value_checks`.
    ``pad_to``: the multiple that sequences are padded to (:mod:`autopar.runtime.inputs.sequences`).
    """

    _values: ValueChecks

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        compile: Compile,
        *,
        seed: int | None = None,
        scaled: bool = False,
        check_inputs: Check = "first",
        watch: Watch | None = None,
        compilation: Compilation | None = None,
        values: ValueChecks | None = None,
        pad_to: int | None = None,
    ) -> None:
        check_plain(module)
        super().__init__()
        take_over(self, module)
        check_hooks(tuple(hook for hook in hooks_inside(module) if hook.backward), set())
        weights = Weights(module, mesh_groups(mesh), seed)
        random = RandomState(shared_seed(weights.groups, seed))
        scale = LossScale() if scaled else None
        self._set_up(module, weights, random, compile, scale, check_inputs, watch, compilation)
        self.__dict__.update(_values=values or ValueChecks(), _pad_to=pad_to)
        self._checks.compare_options()

    def _set_up(
        self,
        module: nn.Module,
        weights: Weights,
        random: RandomState,
        compile: Compile,
        loss_scale: LossScale | None,
        check_inputs: Check,
        watch: Watch | None,
        compilation: Compilation | None,
    ) -> None:
        for name in (*STATE, *STATE_DICT_HOOKS):
            self.__dict__[name] = module.__dict__[name]
        self.training = module.training
        self.__dict__["_is_whole"] = False
        self._weights, self._random, self._loss_scale = weights, random, loss_scale
        if loss_scale is not None:
            watch_optimizers(self, loss_scale)
        self._compile = compile
        self._programs = Programs(module, speaks=self._groups.over(self._groups.axes).index == 0)
        self._exchange, self._check_inputs = Exchange(self._groups), check_inputs
        self._compilation = compilation
        self._checks = InputChecks(self._exchange, check_inputs)
        self._watch = watch or Watch(self._exchange.ranks, self._exchange.index)
        self._plan: Any = None
        self._outputs: OutputsWanted = "all"
        self._timelines: list[Timeline] | None = None
        self._told: set[int] = set()
        self._told_lost: set[str] = set()
        self.__dict__["_original"] = module  # Last: from now on, new attributes are set on the original.

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """An independent parallel module, for example for an average of weights. Parameters and buffers are copies with
        the same placements, now or once they are placed. It compiles its own programs, under the same plan."""
        self._check_parallel()
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        nn.Module.__init__(copied)
        copied.__dict__.update({name: copy.deepcopy(self.__dict__[name], memo) for name in hook_tables(self)})
        module = copied_module(self._original, memo)
        weights, compile = self._weights.copied_for(module), compile_for(self._compile, module)
        scale = None if self._loss_scale is None else self._loss_scale.copied()
        checked, random = self._check_inputs, copy.copy(self._random)
        copied._set_up(module, weights, random, compile, scale, checked, self._watch, self._compilation)
        copied.__dict__.update(_values=replace(self._values), _pad_to=self._pad_to)
        copied._plan = self._plan
        return copied

    @property
    def _groups(self) -> MeshGroups:  # type: ignore[override]
        """The groups of the mesh in the plan's shape."""
        return self._weights.groups

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the original's return value, with plain global tensors. With gradients enabled, ``loss.backward()``
        sets ``.grad`` of the parameters.

        Every output, also a large one such as logits, is gathered on every rank, which plans do not price. So ranks may
        use outputs differently (for example, only one prints them); if tensors were gathered at their first use, the
        others would wait for ever. If only the loss is needed, :meth:`step` gathers nothing else.
        """
        if self._is_whole:
            return self._original(*args, **kwargs)
        grad = torch.is_grad_enabled() and self._wants_grad(args, kwargs)
        kind = self._kind(args, kwargs, grad, self._outputs if grad else "all")
        padded = filled(self._programs.calls(), args, kwargs)
        if padded is not None:
            self._compare(args, kwargs, kind, None)  # Ranks' batches may differ but be equal once padded.
            args, kwargs, kind = padded.args, padded.kwargs, self._kind(padded.args, padded.kwargs, grad, kind.outputs)
        call = self._prepared(args, kwargs, kind)
        cut = cut_of(call, padded)
        if not (self.training and grad) and self._programs.speaks:  # In training only the loss matters.
            call.warn_of_lost(self._told_lost)
        leaves = call.leaves(args, kwargs)
        if grad:
            other, name = partial(self._for_each, args, kwargs, kind), partial(name_of, self._original, args, kwargs)
            check = BackwardCheck(self._values, self._original, self._exchange, leaves) if self._values.due() else None
            if isinstance(call, PipelineCall):
                outputs = differentiate_stepped(call, leaves, check)
            else:
                outputs = differentiate(call, leaves, other, name, check)
            if check is not None:
                check.saw(outputs.get(call.signature.loss or ""))
            return call.rebuild(cut(outputs))
        if isinstance(call, PipelineCall):
            return call.rebuild(cut(call.run(leaves)))
        return call.rebuild(cut({name: call.present(name, value) for name, value in call.run(leaves)[0].items()}))

    def step(self, *args: Any, scale: Any = None, **kwargs: Any) -> torch.Tensor:
        """Runs forward and backward of the model's loss, and adds gradients to ``.grad`` of the parameters. Returns the
        detached loss, the same on every rank. ``targets=``: the second argument of a loss function, ``loss_fn(output,
        targets)``, as tensors in any tree; the model does not get them. Gradients are those of the loss times ``scale``
        (1 / n to accumulate n batches as one of n times their size); the returned loss is not scaled. A model whose
        forward has a parameter ``scale`` gets it instead. Raises :class:`AutoparError` if there is no loss."""
        args, kwargs = before_step(self, args, kwargs)
        args, kwargs = self._padded_call(args, kwargs)
        kwargs, factor = step_scale(self._original, kwargs, scale)
        call = self.prepare(args, kwargs, "loss", grad=True)
        leaves = call.leaves(args, kwargs)
        if not self._values.due():
            return differentiated(call.step(leaves, factor))
        checked = checked_step(self._values, call, leaves, factor, self._original, self._random, self._exchange)
        return differentiated(checked)

    def _for_each(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], before: CallKind) -> Call:
        """The program that differentiates every output of a call of the kind ``before``. Later calls use it too."""
        kind = self._kind(args, kwargs, True, "each")
        if kind.circumstances != before.circumstances:
            raise AutoparError(
                "backward() of a loss of your own, computed from outputs beside the model's loss, came after the "
                "model's mode or which parameters are trained changed: call backward() before model.eval() and the like"
            )
        self._outputs = "each"
        call = self._prepared(args, kwargs, kind)
        assert isinstance(call, Call)
        return call

    def prepare(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outputs: OutputsWanted = "all",
        *,
        grad: bool = True,
    ) -> AnyCall:
        """Compiles a program for calls like this one, unless there is one, without running it. Collective over the
        mesh."""
        return self._prepared(args, kwargs, self._kind(args, kwargs, grad, outputs))

    def _kind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], grad: bool, outputs: OutputsWanted) -> CallKind:
        self._check_parallel()
        return kind_of(self._original, args, kwargs, grad, outputs, self._weights.walk)

    def _prepared(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: CallKind) -> AnyCall:
        existing = self._programs.find(kind)
        self._compare(args, kwargs, kind, existing)
        call = existing or self._make(args, kwargs, kind)
        if isinstance(call, PipelineCall):
            call.timelines = self._timelines
        return call

    def _compare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: CallKind, call: AnyCall | None) -> None:
        """Compares this call between ranks before it runs; ``call``: its program, if there is one."""
        if not self._checks.active:
            self._checks.agree_to_stop()
            return
        leaves = tree_flatten((args, dict(sorted(kwargs.items()))))[0]

        def named() -> dict[str, Leaf]:
            return named_leaves(self._original, args, kwargs, kind)

        def because() -> str:
            return "; ".join(difference.text for difference in self._programs.why(kind, named()))

        number = None if call is None else self._programs.number(call)
        self._checks.check(CheckedCall(kind, leaves, number, lambda: list(named()), because))

    def _make(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: CallKind) -> AnyCall:
        """Compiles a program for calls of this kind."""
        self._weights.check_own()
        check_hooks(kind.hooks, self._told)
        leaves = named_leaves(self._original, args, kwargs, kind)
        why, begin = self._programs.why(kind, leaves), time.perf_counter()
        with self._watch.planning():
            compiled = self._compile(Request(args, dict(kwargs), self.training, kind.grad, kind.outputs))
        check_agreement(compiled.fingerprint, self._groups)
        self._weights.groups = self._groups.regrouped(compiled.program.mesh)
        bound = PipelineCall if isinstance(compiled.program, PipelineProgram) else Call
        draw_state = partial(self._random.advance, self.training and kind.grad)
        call = bound(compiled, self._weights, self._groups, draw_state, self._loss_scale, self._compilation)
        call.watch_indices(self._exchange)
        call.watch = self._watch
        self._watch.expect(compiled.plan)
        self._plan = compiled.plan
        seconds = time.perf_counter() - begin
        guards, planned = compiled.guards, compiled.planned
        self._programs.add(kind, leaves, call, why=why, guards=guards, planned=planned, seconds=seconds)
        return call

    def programs(self) -> tuple[ProgramLine, ...]:
        """The programs compiled so far, oldest first. Each kind of call (shapes, dtypes, values of non-tensor inputs,
        modes, frozen parameters) has its own program, with the parameters in the same places. ``str`` of each is a
        line; at most 64 are kept in addition to those that a plan was made for."""
        return self._programs.listing()

    def _wants_grad(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        inputs = tree_flatten((args, kwargs))[0]
        by_inputs = any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)
        return by_inputs or any(parameter.requires_grad for parameter in self.parameters())

    @property
    def plan(self) -> Any:
        """The plan of the latest compiled call, with a warning for each part of this rank's programs that Inductor
        could not compile. Raises :class:`AutoparError` before there is one."""
        if self._plan is None:
            raise AutoparError(
                "there is no plan yet: the model is planned at its first batch; run one, or pass "
                "example_inputs to parallelize"
            )
        return self._plan if self._compilation is None else self._compilation.noted_in(self._plan)

    def optimizer(
        self, cls: Callable[..., torch.optim.Optimizer], params: Any = None, **kwargs: Any
    ) -> torch.optim.Optimizer:
        """Creates ``cls`` over the named parameters, before or after the first batch. Its state is sharded like the
        parameters, and it steps on local shards if that gives the same numbers
        (:mod:`autopar.runtime.state.optimizer`). State that the plan keeps elsewhere is on the device only while
        its parameter is updated. ``params``: some of the parameters, or groups of them, as torch takes them: the
        parameters themselves, their names, or those of the model before ``parallelize``
        (:mod:`autopar.runtime.state.param_groups`)."""
        groups = ParamGroups(self)
        optimizer = make_optimizer(cls, groups.resolve(params), self._tier_of_state, **kwargs)
        groups.follow(optimizer)
        if self._loss_scale is not None:
            watch_zero_grad(optimizer, self._loss_scale)
        return optimizer

    def _tier_of_state(self, path: str) -> str:
        """Where the plan, if there is one, keeps the optimizer state of the parameter; "": on the device."""
        placements = getattr(self._plan, "parameters", {})
        return str(placements[path].offload) if path in placements else ""

    @property
    def autopar_parts(self) -> Parts:
        """For autopar's own use: what checkpoints need to know."""
        return Parts(self._weights, self._plan, self._compile, self._tier_of_state, self._watch.call)

    def full_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter, gradient or optimizer state of this model on every rank, also if it is on another
        pipeline stage (where the tensor's own ``full_tensor()`` is empty). Collective over the mesh."""
        with torch.no_grad():
            return whole_everywhere(tensor.detach(), self._groups)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        parameters: Iterable[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """:func:`torch.nn.utils.clip_grad_norm_` of all parameters (or those given), under any plan. Returns the norm
        before clipping, on every rank. Collective over the mesh."""
        with torch.no_grad():
            gradients = gradients_of(self.parameters() if parameters is None else parameters)
            norm = total_norm(gradients, self._groups, float(norm_type))
            if error_if_nonfinite and not bool(norm.isfinite()):
                raise AutoparError(f"the norm of order {norm_type} of the gradients is {float(norm)}: not clipped")
            clip(gradients, norm, float(max_norm))
        return norm

    def local_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Converts the tensors of a global batch to DTensors, of which this rank has the parts that the plan reads: a
        dict for keyword inputs, a tuple for positional ones. Collective. (:meth:`from_local` joins a rank's own
        samples.)"""
        check_one_form("local_batch", args, kwargs)
        call = self._any_call(args, kwargs)
        leaves = as_parts(call, call.leaves(args, kwargs))
        positional, keywords = tree_unflatten(leaves, call.signature.input_spec)
        return positional if args else keywords

    def _any_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AnyCall:
        """A compiled call for such a batch, with any outputs, since all read the same placements."""
        kind = kind_of(self._original, args, kwargs, False, "all", self._weights.walk)
        calls = self._programs.calls()
        existing = next((call for other, call in calls if replace(other, grad=False, outputs="all") == kind), None)
        self._compare(args, kwargs, kind, existing)
        return existing or self.prepare(args, kwargs, "all", grad=torch.is_grad_enabled())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As :meth:`torch.nn.Module.zero_grad`; under fp16 also forgets that gradients overflowed."""
        if set_to_none and not self._is_whole:  # Quicker than torch's walk; it would keep whole parameters.
            for parameter in self._weights.walk.parameters():
                parameter.grad = None
        else:
            super().zero_grad(set_to_none)
        if self._loss_scale is not None:
            self._loss_scale.consumed()

    @contextmanager
    def record_timeline(self) -> Iterator[list[Timeline]]:
        """Measures the seconds of each action of steps in microbatches inside the ``with`` block: appends a
        :class:`Timeline` of all pipeline stages for each run to the list that it yields. Steps without a pipeline have
        none."""
        timelines: list[Timeline] = []
        self._timelines = timelines
        try:
            yield timelines
        finally:
            self._timelines = None

    def train(self, mode: bool = True) -> ParallelModule:
        super().train(mode)
        self._original.training = mode
        return self

    def extra_repr(self) -> str:
        return f"{type(self._original).__name__} on mesh {self._groups.shape}"
