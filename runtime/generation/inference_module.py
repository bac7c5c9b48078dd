"""The parallel module of a plan for inference: forward alone, and ``generate`` with a cache that rests on the devices.

``generate`` is transformers' own: its loop, its sampling, its stopping. Every forward of the loop is a call of this
module, so that each rank gets the same logits, and chooses the same token from them. Random numbers begin where those
of the first rank are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Self

import torch

from autopar.errors import AutoparError
from autopar.ir.program import TensorSlot
from autopar.runtime.calls.compiled import OutputsWanted
from autopar.runtime.calls.pipeline_call import PipelineCall
from autopar.runtime.calls.programs import AnyCall
from autopar.runtime.calls.resident import cache_slots, give_resident, new_resident
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.state.parameters import broadcast_first
from autopar.torch_internals.hugging_face import cache_among, cache_name, length_of_generation
from autopar.torch_internals.trees import tree_map

from .cache import CacheInputs, check_cache, fill_in, hold_all_tokens
from .one_token import check_generates, check_prompts, one_token

# What other ways to generate than token by token do with a cache.
_REARRANGING = ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices")
_NO_TRAINING = (
    "{what}: the model was parallelized for inference, so there are no gradients and no optimizer state, and "
    'parameters rest where forward needs them. To train, parallelize the plain model without mode="inference"'
)


class InferenceModule(ParallelModule):
    """See the module docstring. Calls take a ``transformers.StaticCache`` as ``cache`` (``past_key_values`` before
    transformers 5.24); the first call with a cache makes its tensors, sharded as the plan says."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`ParallelModule.forward`, without gradients."""
        if self._is_whole:
            return self._original(*args, **kwargs)
        with torch.no_grad():
            cache, others = cache_among(kwargs)
            result = super().forward(*args, **kwargs) if cache is None else self._with_cache(cache, args, others)
        return _without_backward(result) if torch.is_grad_enabled() else result

    def prepare(self, args: Any, kwargs: Any, outputs: OutputsWanted = "all", *, grad: bool = False) -> AnyCall:
        """As :meth:`ParallelModule.prepare`, for forward alone."""
        return super().prepare(args, kwargs, "all", grad=False)

    def _with_cache(self, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call with a cache, which then holds the tokens of this call too. ``kwargs`` are the other arguments."""
        name = cache_name(self._original)
        tokens = _tokens(args, kwargs)
        rows, added = tokens.shape[:2]
        hold_all_tokens(cache)
        check_cache(cache)
        if not cache.is_initialized:
            self._make_cache(cache, rows)
        _check_room(cache, int(added))
        self._told_lost.add(name)  # The caller has it.
        result = super().forward(*args, **{**kwargs, name: CacheInputs.of(cache, self._original, rows)})
        for layer in cache.layers:
            layer.cumulative_length = layer.cumulative_length + added
        if name in getattr(result, "__dataclass_fields__", ()):
            result[name] = cache
        return result

    def _make_cache(self, cache: Any, rows: int) -> None:
        """Makes the tensors of ``cache``, where the program for one token of each sequence has them."""
        check_generates(self._original)
        inputs = one_token(self._original, rows, cache)
        empty = CacheInputs.of(cache, self._original, rows)
        prefix = cache_name(self._original)
        call = self.prepare((), {**inputs, prefix: empty})
        slots = _slots(call)
        inside = call.stages.own if isinstance(call, PipelineCall) else call.groups
        names = [f"{prefix}.{key.key}" for key, _ in empty.with_keys()[0]][1:]
        handles = []
        for name, tensor in zip(names, empty.tensors, strict=True):
            if name not in call.caches:
                raise AutoparError(
                    f"{type(self._original).__name__} does not use {name}: its cache is not that of keys and values"
                )
            microbatches = call.program.microbatches if isinstance(call, PipelineCall) else 1
            resident = new_resident(call.caches[name], slots.get(name), inside, microbatches)
            handles.append(give_resident(tensor, resident))
        fill_in(cache, handles, empty.length)
        for name in _REARRANGING:
            setattr(cache, name, _refuse_to_rearrange)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``generate`` of the original model, with the same arguments, under this plan: greedy search and sampling.
        Returns the same on every rank. Raises :class:`AutoparError` for a model that is no causal language model of
        transformers, and for prompts that are no tensor."""
        if self._is_whole:
            return self._original.generate(*args, **kwargs)  # type: ignore[operator]
        check_generates(self._original)
        check_prompts(*args[:1], *(kwargs[name] for name in ("inputs", "input_ids") if name in kwargs))
        kwargs = {**self._cache_arguments(kwargs), **kwargs}
        self._agree_on_random_numbers()
        with torch.no_grad(), self._called_by_its_original():
            return self._original.generate(*args, **kwargs)  # type: ignore[operator]

    def _cache_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of ``generate`` that make its cache one of fixed shapes."""
        if cache_among(given)[0] is not None or given.get("use_cache") is False:
            return {}
        length = self._compile.options.cache_length  # type: ignore[attr-defined]
        return {
            "cache_implementation": "static",
            "disable_compile": True,
            **({"max_cache_len": length} if length else {}),
        }

    def _agree_on_random_numbers(self) -> None:
        """Sets the state of torch's generators to that of the first rank. Collective over the mesh."""
        state = next(broadcast_first([torch.get_rng_state()], self._groups))[1]
        torch.set_rng_state(state.cpu())
        device = self._groups.device
        if device.type == "cuda":
            state = next(broadcast_first([torch.cuda.get_rng_state(device)], self._groups))[1]
            torch.cuda.set_rng_state(state.cpu(), device)

    @contextmanager
    def _called_by_its_original(self) -> Iterator[None]:
        """Inside, calls of the original module are calls of this one."""
        own = self._original.__dict__
        prepare: Callable[..., Any] = self._original.prepare_inputs_for_generation  # type: ignore[assignment]
        plain: Callable[..., Any] = self._original.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            _leave(own)  # The model is traced, and runs nowhere, as it is.
            try:
                return self(*args, **kwargs)
            finally:
                own.update(replaced)

        def prepared(*args: Any, **kwargs: Any) -> Any:
            if (cache := cache_among(kwargs)[0]) is not None:
                # Before masks are made for it.
                hold_all_tokens(cache, length_of_generation(self._original))
            return prepare(*args, **kwargs)

        forward.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
        prepared.__signature__ = inspect.signature(prepare)  # type: ignore[attr-defined]
        replaced = {"forward": forward, "prepare_inputs_for_generation": prepared}
        own.update(replaced)
        try:
            yield
        finally:
            _leave(own)

    def step(self, *args: Any, scale: Any = None, **kwargs: Any) -> NoReturn:
        raise AutoparError(_NO_TRAINING.format(what="model.step(...)"))

    def optimizer(self, cls: Any, params: Any = None, **kwargs: Any) -> NoReturn:
        raise AutoparError(_NO_TRAINING.format(what="model.optimizer(...)"))

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AutoparError(_NO_TRAINING.format(what="model.clip_grad_norm_(...)"))

    def train(self, mode: bool = True) -> Self:
        if mode:
            raise AutoparError(_NO_TRAINING.format(what="model.train()"))
        super().train(mode)
        return self


def _leave(own: dict[str, Any]) -> None:
    """Takes what :meth:`InferenceModule._called_by_its_original` replaced out of the module's attributes."""
    for name in ("forward", "prepare_inputs_for_generation"):
        own.pop(name, None)


def _slots(call: AnyCall) -> Mapping[str, TensorSlot]:
    """The caches that the programs of this rank take, by name."""
    if isinstance(call, PipelineCall):
        return cache_slots([slot for chunk in call.program.chunks.values() for slot in chunk.placeholders])
    return cache_slots(call.program.placeholders)


def _tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The tokens of a call, or what is given for them: [rows, length, ...]."""
    for value in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]):
        if isinstance(value, torch.Tensor):
            return value
    raise AutoparError("a call with a cache needs input_ids (or inputs_embeds), whose tokens the cache will hold")


def _check_room(cache: Any, added: int) -> None:
    """Raises :class:`AutoparError` unless the cache has room for ``added`` tokens more."""
    held, room = int(cache.layers[0].cumulative_length), min(layer.max_cache_len for layer in cache.layers)
    if held + added > room:
        raise AutoparError(
            f"the cache holds {held} of {room} tokens and gets {added} more: begin with "
            f"transformers.StaticCache(config, max_cache_len={held + added}) or more"
        )


def _refuse_to_rearrange(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise AutoparError(
        "beam search and assisted generation rearrange the cache, which rests on the devices as the plan says: "
        "generate by greedy search or sampling (num_beams=1), or on whole parameters, on every rank: "
        "`with model.full_params() as whole: whole.generate(...)`"
    )


class _Refuse(torch.autograd.Function):
    """The identity, whose backward is an error that says why there is none."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, _anchor: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> NoReturn:
        raise AutoparError(_NO_TRAINING.format(what="backward()"))


def _without_backward(result: Any) -> Any:
    """``result`` of a call outside of ``no_grad``, whose backward is refused with a reason."""
    anchor = torch.zeros((), requires_grad=True)

    def leaf(value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
        return _Refuse.apply(value, anchor) if is_real else value

    return tree_map(leaf, result)
