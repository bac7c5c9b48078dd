"""Fields that layouts had for what other systems do and plans do not; errors say where these went."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TypeVar

from .errors import ArgumentError

C = TypeVar("C")
# What each field, or each value of a field, said.
REMOVED: Mapping[str, str] = {
    "overlap": "which messages other systems send while they compute",
    "eager": "which modules run operation by operation, as in trainers that compile nothing",
    "cuda_graphs": "which modules wait for the host, which launches their kernels one by one",
    "replicated": "which modules every tensor rank computes in full, as the loss in Aleph Alpha's library",
    "operands": "whether tensor ranks keep operands of products as gathered",
    "separate_dgrad_reductions": "of which modules tensor ranks reduce each input's gradient by itself",
    "context_load_balancing": "whether context ranks attend to as many tokens each",
    "retained_inputs": "of which modules trainers keep the inputs until backward has passed",
    "recomputed": "which modules backward recomputes as a whole (Megatron-Core's recompute_modules)",
    "recompute=elementwise": "that operands of products which elementwise operations compute are computed again",
    "recompute=operations": "that every other product is computed again (torch's selective checkpoints)",
    "precision=fp8": "that products with weights are in fp8",
    "weights": "whether weights rest in fp8",
    "gradients": "in which dtype other systems accumulate gradients",
    "states": "in which dtype other systems keep moments",
    "masters": "how TransformerEngine keeps master weights",
    "moments": "how many moments other optimizers keep",
    "allocation": "what other systems' allocators lose",
    "offload_layers": "of how many layers saved activations rest on the host (cpu_offloading_num_layers)",
    "reduction": "what other systems' ranks get of reduced gradients",
    "reducing": "that DeepSpeed reduces gradients with every microbatch",
    "gathers": "that DeepSpeed gathers each weight by itself",
    "gradient_accumulation_fusion": "whether products add gradients of microbatches up",
    "scatter": "whether values travel between stages in shards",
    "embedding_as_layers": "as how many layers the embedding counts where other systems cut stages",
    "head_as_layers": "as how many layers the head counts where other systems cut stages",
    "cuts": "that Alpa cuts stages between any operations",
    "capacity": "how many slots other systems give each expert",
    "dispatch": "how libraries made for mixtures send tokens to experts (DeepEP, HybridEP)",
}
# What some of them were called before.
OLD_NAMES: Mapping[str, str] = {
    "adding": "gradient_accumulation_fusion",
    "apart": "separate_dgrad_reductions",
    "balanced": "context_load_balancing",
    "graphed": "cuda_graphs",
    "holds": "retained_inputs",
    "lead": "embedding_as_layers",
    "tail": "head_as_layers",
    "whole": "replicated",
}


def removed(name: str) -> str:
    """Why layouts have no such field or value (``"precision=fp8"``) any more; empty if they never had.

    >>> removed("moments").partition(";")[0]
    'it said how many moments other optimizers keep'
    """
    current = OLD_NAMES.get(name, name)
    if current not in REMOVED:
        return ""
    field, _, value = current.partition("=")
    return (
        f"it said {REMOVED[current]}; plans do not, so it is priced beside the product: "
        f"benchmarks.recipes.Recipe({field}={repr(value) if value else '...'})"
    )


def names_removed_fields(cls: type[C]) -> type[C]:
    """Makes the constructor of a dataclass raise :class:`ArgumentError` for a field that was removed."""
    initialise: Callable[..., None] = cls.__init__

    @wraps(initialise)
    def checked(self: C, *args: object, **kwargs: object) -> None:
        for name in kwargs:
            if why := removed(name):
                raise ArgumentError(f"{cls.__name__} has no argument {name!r} any more: {why}")
        initialise(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls
