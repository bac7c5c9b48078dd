"""Hugging Face's Trainer: the same arguments, the same losses, and a model that is parallel by autopar's plan.

.. code-block:: python

    trainer = AutoparTrainer(model, args, train_dataset=data, mesh=(2, 2), options=autopar.Options(pad_to=64))
    trainer.train()

The global batch is that of data parallelism: ``per_device_train_batch_size`` times the number of processes. Of it every
process reads its share, and all work on the whole as the plan says, so the Trainer's own arithmetic is that of one
process with the global batch. :class:`AutoparTrainerMixin` does the same for subclasses of Trainer, such as TRL's.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import nn
from transformers.trainer_utils import get_last_checkpoint

from autopar.api import Mesh
from autopar.checkpoint import load, save
from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.options import Options
from autopar.plans.plan import Plan
from autopar.runtime.module.parallel_module import ParallelModule

from .accelerate import STATE_FOLDER, AutoparAccelerator, Planning
from .trainer_arguments import as_one_process, check_arguments, options_of


class AutoparTrainerMixin:
    """Comes before ``Trainer``, or a subclass of it, among the bases of a class: ``class AutoparSFTTrainer(
    AutoparTrainerMixin, SFTTrainer)``. ``mesh`` (default: all processes in one axis), ``options``, ``cluster`` and
    ``plan`` are those of :func:`autopar.parallelize`; everything else is the Trainer's.

    The model is planned at its first batch. ``trainer.model`` is the original, whose parameters are then DTensors, and
    ``trainer.parallel_model`` the parallel module. ``save_model`` and checkpoints have the files of ``save_pretrained``
    beside the training's state in the folder ``autopar-0``, which fits any mesh; every process calls them. Raises
    :class:`OptionsError` for arguments that choose another parallelism.
    """

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    state: Any
    _parallel_kept: ParallelModule | None = None

    def __init__(
        self,
        *given: Any,
        mesh: Mesh | None = None,
        options: Options | None = None,
        cluster: str | Cluster | None = None,
        plan: Plan | None = None,
        **keywords: Any,
    ) -> None:
        positional = list(given)
        if isinstance(positional[0] if positional else keywords.get("model"), ParallelModule):
            raise OptionsError(
                f"{type(self).__name__} makes the model parallel itself: give the plain model, and mesh=, options=, "
                "cluster= and plan= to the trainer instead of to autopar.parallelize"
            )
        arguments: Any = positional[1] if len(positional) > 1 else keywords.get("args")
        check_arguments(arguments)
        self._given_arguments: Any = arguments
        self._planning = Planning(mesh, options_of(arguments, options or Options()), cluster, plan)
        self._resumed: str | None = None
        if len(positional) > 1:
            positional[1] = as_one_process(arguments)
        else:
            keywords["args"] = as_one_process(arguments)
        super().__init__(*positional, **keywords)
        if self.args.world_size != 1:
            raise OptionsError(
                f"{type(self).__name__} made its own {type(self.args).__name__} of the {type(arguments).__name__} "
                f"that it was given: give args={type(self.args).__name__}(...)"
            )
        self.add_callback(_Restore(self))  # type: ignore[attr-defined]

    @property
    def parallel_model(self) -> ParallelModule:
        """The parallel module of ``self.model``."""
        parallel: ParallelModule = self.accelerator.prepare_model(self.model)
        if parallel is not self._parallel_kept:
            self._parallel_kept = parallel  # train() begins with what frees the memory of the accelerator.
            take_whole_values(self.model, parallel)
        return parallel

    @property
    def _is_parallel(self) -> bool:
        return self._parallel_kept is not None and self._parallel_kept.module is self.model

    def create_optimizer(self, *given: Any, **keywords: Any) -> Any:
        """As ``Trainer.create_optimizer``, which train() calls at its beginning."""
        _ = self.parallel_model  # A second train() does not prepare the model, but has freed it.
        return super().create_optimizer(*given, **keywords)  # type: ignore[misc]

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        AutoparAccelerator.over(self.accelerator, self._planning)
        self.accelerator.dataloader_config.split_batches = True  # Batch sizes are those of global batches.
        self.gather_function = self.accelerator.gather_for_metrics

    def create_scheduler(self, *given: Any, **keywords: Any) -> Any:
        scheduler = super().create_scheduler(*given, **keywords)  # type: ignore[misc]
        self.accelerator.follow(scheduler)
        return scheduler

    def train(self, resume_from_checkpoint: str | bool | None = None, *given: Any, **keywords: Any) -> Any:
        """As ``Trainer.train``; resumes on any mesh and number of processes."""
        folder = resume_from_checkpoint or None
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
            if folder is None:
                raise ValueError(f"No valid checkpoint found in output directory ({self.args.output_dir})")
        self._resumed = None if folder is None else _resumable(str(folder), self._given_arguments.save_only_model)
        with ExitStack() as stack:
            if hasattr(transformers.trainer, "skip_first_batches"):
                skip = self.accelerator.skip_first_batches
                stack.enter_context(patch.object(transformers.trainer, "skip_first_batches", skip))
            return super().train(folder, *given, **keywords)  # type: ignore[misc]

    def restore(self) -> None:
        """Loads what the checkpoint that training resumes from has beside the weights."""
        if self._resumed is not None:
            load(self._resumed, self.parallel_model, self._bare_optimizer, scheduler=self.lr_scheduler)
            self._resumed = None

    @property
    def _bare_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One ``step`` of the parallel model, which keeps outputs where they are; a loss that the Trainer computes from
        outputs (label smoothing, ``compute_loss_func``, an own ``compute_loss``) is differentiated as usual."""
        parallel = self.parallel_model
        if not self._has_own_loss(inputs):
            return super().training_step(parallel, inputs, num_items_in_batch)  # type: ignore[misc,no-any-return]
        parallel.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs, scale = dict(inputs), 1.0
        if getattr(self, "model_accepts_loss_kwargs", False) and num_items_in_batch is not None:
            inputs["num_items_in_batch"] = num_items_in_batch
        else:
            scale /= getattr(self, "current_gradient_accumulation_steps", self.args.gradient_accumulation_steps)
        return parallel.step(**inputs, scale=scale) * scale

    def _has_own_loss(self, inputs: Any) -> bool:
        """Whether the loss is the model's."""
        computed = getattr(self, "compute_loss_func", None) or getattr(self, "label_smoother", None)
        return (
            type(self).compute_loss is transformers.Trainer.compute_loss  # type: ignore[attr-defined]
            and computed is None
            and getattr(self, "loss_is_scaled_for_ga", None) is None
            and "labels" in inputs
        )

    def prediction_step(self, model: nn.Module, *given: Any, **keywords: Any) -> Any:
        parallel = self.parallel_model.eval()
        if getattr(self.args, "predict_with_generate", False):
            with parallel.full_params() as original:  # Every process generates for the whole batch.
                return super().prediction_step(original, *given, **keywords)  # type: ignore[misc]
        return super().prediction_step(parallel, *given, **keywords)  # type: ignore[misc]

    def floating_point_ops(self, inputs: Any) -> int:
        """This process's share, since the Trainer adds those of all."""
        return int(super().floating_point_ops(inputs)) // int(self.accelerator.num_processes)  # type: ignore[misc]

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self.parallel_model.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.parallel_model.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As ``Trainer.save_model``, called by every process; one writes. A checkpoint of the loop also has the state
        of the training."""
        if not self._is_parallel:
            return super().save_model(output_dir, _internal_call)  # type: ignore[misc,no-any-return]
        parallel, own = self.parallel_model, self.args
        each_node = bool(getattr(own, "save_on_each_node", False))
        try:
            self.args = self._given_arguments
            with parallel.full_params(rank0_only=not each_node):
                super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        finally:
            self.args = own
        if _internal_call and output_dir is not None and not self._given_arguments.save_only_model:
            folder = os.path.join(output_dir, f"{STATE_FOLDER}-0")
            step = self.state.global_step
            save(folder, parallel, self._bare_optimizer, scheduler=self.lr_scheduler, step=step)
        return None


class _Restore(transformers.TrainerCallback):  # type: ignore[misc]
    """Restores the state when everything is prepared."""

    def __init__(self, trainer: AutoparTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.restore()


class AutoparTrainer(AutoparTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` with models that are parallel by autopar's plan: see :class:`AutoparTrainerMixin`."""


def _resumable(folder: str, weights_only: bool) -> str | None:
    """The state in a checkpoint of the Trainer. Raises :class:`OptionsError` if another trainer has saved it."""
    inside = os.path.join(folder, f"{STATE_FOLDER}-0")
    if os.path.isdir(inside):
        return inside
    if not weights_only:
        raise OptionsError(
            f"{folder} was saved without autopar, so the state of its optimizer cannot be taken over: "
            f"AutoModel.from_pretrained({folder!r}) and train() go on from the weights"
        )
    return None


def take_whole_values(module: nn.Module, parallel: ParallelModule) -> None:
    """From now on ``module.load_state_dict`` takes whole plain tensors for parameters that are DTensors."""

    def convert(_module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if not prefix:
            state.update(parallel.own_values(state))

    module.register_load_state_dict_pre_hook(convert)
