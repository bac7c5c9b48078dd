"""TrainingArguments as AutoparTrainer reads them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from autopar.errors import OptionsError
from autopar.options import Options

# Arguments that choose a parallelism of their own, or start the training anew with other batches.
_EXCLUDED = ("deepspeed", "fsdp", "parallelism_config", "auto_find_batch_size")
# Recomputation of activations, by the names of several versions.
_RECOMPUTE = ("gradient_checkpointing", "activation_checkpointing")

# Conversions of the model for evaluation, whose parameters are placed by the plan.
_CONVERSIONS = ("bf16_full_eval", "fp16_full_eval")


class OneProcess:
    """The state of all processes, as if there were one: what all work on is one global batch."""

    num_processes = 1

    def __init__(self, state: Any) -> None:
        self.__dict__["_state"] = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_state"], name)


def check_arguments(arguments: Any) -> None:
    """Raises :class:`OptionsError` for arguments that exclude a plan."""
    if arguments is None:
        raise OptionsError("AutoparTrainer needs args=TrainingArguments(...): they start the processes' group")
    chosen = [name for name in _EXCLUDED if getattr(arguments, name, None)]
    if chosen:
        value = getattr(arguments, chosen[0])
        raise OptionsError(
            f"{type(arguments).__name__}({chosen[0]}={value!r}): the plan chooses how the model is divided. Leave it "
            "out; autopar.Options has memory_limit, zero, stages and pins"
        )
    converted = [name for name in _CONVERSIONS if getattr(arguments, name, False)]
    if converted:
        raise OptionsError(
            f"{type(arguments).__name__}({converted[0]}=True) converts the parameters, which training needs as they "
            f"are: leave it out; {converted[0].split('_')[0]}=True trains and evaluates in that precision"
        )


def options_of(arguments: Any, options: Options) -> Options:
    """``options`` with what the arguments ask of the program: recomputation and compilation."""
    if options.recompute is None and any(getattr(arguments, name, False) for name in _RECOMPUTE):
        options = replace(options, recompute="full")
    if options.compile == "auto" and getattr(arguments, "torch_compile", False):
        options = replace(options, compile=True)
    return options


def as_one_process(arguments: Any) -> Any:
    """The same arguments for one process with the global batch, whose model needs no wrapping. The Trainer saves
    weights alone: autopar saves the rest."""
    _ = arguments.device  # The group of processes starts here.
    view, world = copy.copy(arguments), arguments.world_size
    view.per_device_train_batch_size *= world
    view.per_device_eval_batch_size *= world
    view.distributed_state = OneProcess(arguments.distributed_state)
    view.average_tokens_across_devices = False
    view.save_only_model = True
    for name in (*_RECOMPUTE, "torch_compile"):
        if hasattr(view, name):
            setattr(view, name, False)
    return view
