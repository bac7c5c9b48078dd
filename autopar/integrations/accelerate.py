"""Accelerate: an ``Accelerator`` whose ``prepare`` makes models parallel by autopar's plan instead of by copies.

.. code-block:: python

    accelerator = AutoparAccelerator(mesh=(2, 2))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

A process is not a replica: all processes work on one global batch. So a prepared loader gives every process the whole
batch (each reads its share), losses and outputs are those of the whole batch, and ``gather`` and ``gather_for_metrics``
return what they are given. As under DDP, the global batch has the loader's batch size times the number of processes,
unless ``split_batches`` says that it is the loader's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list
from torch import nn

from autopar.api import LossFunction, Mesh, parallelize
from autopar.checkpoint import full_state_dict, load, save
from autopar.cluster.description import Cluster
from autopar.errors import AutoparError, OptionsError
from autopar.options import Options
from autopar.plans.plan import Plan
from autopar.runtime.module.parallel_module import ParallelModule

from .optimizers import over_parallel, point_to
from .prepared_loader import PreparedLoader

# The folder of a saved state that has the models and optimizers.
STATE_FOLDER = "autopar"
# Accelerate's own lists of what is prepared, on which its methods work.
_PREPARED = ("_models", "_optimizers", "_schedulers", "_dataloaders")


@dataclass(frozen=True)
class Planning:
    """How models are made parallel: arguments of :func:`autopar.parallelize`. ``mesh``: by default all processes in one
    axis."""

    mesh: Mesh | None = None
    options: Options = field(default_factory=Options)
    cluster: str | Cluster | None = None
    plan: Plan | None = None
    loss_fn: LossFunction | None = None


class AutoparAccelerator(Accelerator):  # type: ignore[misc]
    """See the module docstring. ``mesh``, ``options``, ``cluster``, ``plan`` and ``loss_fn`` are those of
    :func:`autopar.parallelize`; the rest are those of ``Accelerator``. ``mixed_precision`` is the precision of plans
    (``Options(precision=)``) instead of autocast. Raises :class:`OptionsError` with DeepSpeed, FSDP or Megatron
    plugins."""

    # See _PREPARED.
    _models: list[Any]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _dataloaders: list[Any]

    def __init__(
        self,
        *args: Any,
        mesh: Mesh | None = None,
        options: Options | None = None,
        cluster: str | Cluster | None = None,
        plan: Plan | None = None,
        loss_fn: LossFunction | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._take(Planning(mesh, options or Options(), cluster, plan, loss_fn))

    @classmethod
    def over(cls, accelerator: Accelerator, planning: Planning) -> AutoparAccelerator:
        """``accelerator`` itself, which prepares by autopar from now on."""
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator._take(planning)
        return accelerator

    def _take(self, planning: Planning) -> None:
        kind = str(getattr(self.distributed_type, "value", self.distributed_type))
        if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise OptionsError(f"autopar plans all kinds of parallelism itself: prepare without {kind}'s plugin")
        if self.mixed_precision not in ("no", "bf16", "fp16"):
            raise OptionsError(f"mixed_precision={self.mixed_precision!r}: a plan knows 'no', 'bf16' and 'fp16'")
        self._planning = planning
        # By the identity of the original, which its parallel module keeps alive.
        self._known: WeakValueDictionary[int, ParallelModule] = WeakValueDictionary()
        self._replaced: list[tuple[torch.optim.Optimizer, torch.optim.Optimizer]] = []
        self.scaler = None  # A parallel module scales the loss itself.

    @property
    def parallel_module(self) -> ParallelModule:
        """The model that was prepared first. Raises :class:`AutoparError` before there is one."""
        if not self.parallels:
            raise AutoparError("no model is prepared yet: accelerator.prepare(model, ...) before data is read")
        return self.parallels[0]

    @property
    def parallels(self) -> tuple[ParallelModule, ...]:
        """The models that were prepared and not freed."""
        return tuple(model for model in self._models if isinstance(model, ParallelModule))

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        for model in args:
            if isinstance(model, nn.Module):
                self.prepare_model(model)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> ParallelModule:
        """The parallel module of ``model``, made at its first preparation."""
        parallel = self._parallel_of(model)
        if parallel is None:
            parallel = self._made(model)
        self._known[id(parallel.module)] = parallel
        if parallel not in self._models:
            self._models.append(parallel)
        return parallel

    def _parallel_of(self, model: nn.Module) -> ParallelModule | None:
        """That of a model that was prepared, as long as anybody uses it."""
        return model if isinstance(model, ParallelModule) else self._known.get(id(model))

    def _made(self, model: nn.Module) -> ParallelModule:
        planning, options = self._planning, self._planning.options
        if self.mixed_precision != "no" and options.precision is None:
            options = replace(options, precision=self.mixed_precision)
        mesh = (self.num_processes,) if planning.mesh is None else planning.mesh
        return parallelize(
            model, mesh, options=options, cluster=planning.cluster, plan=planning.plan, loss_fn=planning.loss_fn
        )

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """The same optimizer over the parameters of the model that was prepared."""
        if isinstance(optimizer, AcceleratedOptimizer):
            prepared = optimizer
        else:
            parallel = over_parallel(optimizer, self.parallels)
            self._replaced.append((optimizer, parallel))
            prepared = AcceleratedOptimizer(parallel, device_placement=False)
        if prepared not in self._optimizers:
            self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        self.follow(scheduler)
        return super().prepare_scheduler(scheduler)

    def follow(self, scheduler: Any) -> None:
        """Has a scheduler that was made for an optimizer set the rates of the one that replaced it."""
        for before, after in self._replaced:
            if getattr(scheduler, "optimizer", None) is before:
                point_to(scheduler, after)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> PreparedLoader:
        """A loader of whole global batches, of which this process reads its share. What is shuffled is a function of
        the epoch and of ``data_seed`` (default: torch's seed on the main process), so that it resumes."""
        prepared = data_loader
        if not isinstance(data_loader, PreparedLoader):
            seed = self.dataloader_config.data_seed
            prepared = PreparedLoader.of(
                data_loader,
                times=1 if self.split_batches else self.num_processes,
                seed=broadcast_object_list([torch.initial_seed() if seed is None else seed])[0],
                model=lambda: self.parallel_module,
            )
        assert isinstance(prepared, PreparedLoader)
        if prepared not in self._dataloaders:
            self._dataloaders.append(prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, PreparedLoader):
            return dataloader.skipping(num_batches)
        return super().skip_first_batches(dataloader, num_batches)

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: int = 2) -> torch.Tensor:
        """Clips gradients by their norm over all processes and stages."""
        wanted = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for parallel in self.parallels:
            if {id(parameter) for parameter in parallel.parameters()}.issuperset(map(id, wanted)):
                return parallel.clip_grad_norm_(max_norm, norm_type, parameters=wanted)
        norm: torch.Tensor = super().clip_grad_norm_(wanted, max_norm, norm_type)
        return norm

    def gather(self, tensor: Any) -> Any:
        """``tensor``: every process has the whole batch."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """``input_data``, at the end of a loader without what goes beyond its last batch (Trainer repeats a loss as
        often as whole batches have samples)."""
        return super().gather_for_metrics(input_data) if _has_tensors(input_data) else input_data

    @contextlib.contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Nothing: the program has the plan's precision."""
        yield

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The original; outside of ``model.full_params()`` its parameters are DTensors."""
        return model.module if isinstance(model, ParallelModule) else super().unwrap_model(model, *args, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole values on the main process, nothing on the others: for ``save_pretrained(state_dict=)``. Collective."""
        parallel = self._parallel_of(model)
        if parallel is None:
            plain: dict[str, Any] = super().get_state_dict(model, unwrap)
            return plain
        return full_state_dict(parallel)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether gradients overflowed, under fp16."""
        return any(parallel.overflowed for parallel in self.parallels)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As ``Accelerator.save_state``; models, optimizers, schedulers and the position in the first loader as
        checkpoints of autopar, which fit any mesh. Collective."""
        belongings = self._belongings()  # What cannot be saved is an error before older checkpoints are deleted.
        with self._without_prepared():
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        for index, (given, keys) in enumerate(belongings):
            save(_inside(folder, index), *given, step=self.step, **keys)
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Restores what :meth:`save_state` saved, on any mesh. Collective."""
        if input_dir is None:
            raise OptionsError("load_state() without a folder: give the one that save_state returned")
        belongings = self._belongings()
        with self._without_prepared():
            super().load_state(input_dir, load_kwargs, **kwargs)
        for index, (given, keys) in enumerate(belongings):
            load(_inside(os.path.expanduser(input_dir), index), *given, **keys)

    @contextlib.contextmanager
    def _without_prepared(self) -> Iterator[None]:
        kept = {name: getattr(self, name) for name in _PREPARED}
        try:
            self._forget_prepared()
            yield
        finally:
            for name, items in kept.items():
                setattr(self, name, items)

    def _forget_prepared(self) -> None:
        for name in _PREPARED:
            setattr(self, name, [])

    def free_memory(self, *objects: Any) -> Any:
        """As ``Accelerator.free_memory``. A model of which you keep the parallel module gets the same one when it is
        prepared again."""
        for loader in self._dataloaders:
            if isinstance(loader, PreparedLoader):
                loader.release()
        self._replaced.clear()
        self._forget_prepared()  # Before garbage is collected, which Accelerate does first.
        return super().free_memory(*objects)

    def _belongings(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Of each model what :func:`save` takes after the folder: itself with its optimizer, and the rest by name."""
        found = []
        for index, parallel in enumerate(self.parallels):
            own = {id(parameter) for parameter in parallel.parameters()}
            optimizers = [each.optimizer for each in self._optimizers if own.issuperset(_parameters(each))]
            schedulers = [s.scheduler for s in self._schedulers if s.scheduler.optimizer in optimizers]
            loaders = self._dataloaders if index == 0 else []
            if len(optimizers) > 1 or len(schedulers) > 1:
                raise OptionsError(
                    "a model with several optimizers or schedulers: save them by autopar.checkpoint.save"
                )
            given = {"scheduler": schedulers, "dataloader": loaders}
            found.append(((parallel, *optimizers), {name: each[0] for name, each in given.items() if each}))
        return found


def _inside(folder: str, index: int) -> str:
    return os.path.join(folder, f"{STATE_FOLDER}-{index}")


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _has_tensors(data: Any) -> bool:
    if isinstance(data, dict):
        return all(map(_has_tensors, data.values()))
    if isinstance(data, (tuple, list)):
        return all(map(_has_tensors, data))
    return isinstance(data, torch.Tensor)
