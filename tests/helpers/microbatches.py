"""A step in microbatches, on one device: what pipelines and accumulation of gradients are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from autopar.passes.pipeline.microbatch import Microbatched
from tests.helpers.eager_draws import STATE
from tests.helpers.interpret import Results, interpret

Tensors = Mapping[str, torch.Tensor]


def run_microbatches(made: Microbatched, values: Tensors, piece: Callable[[Tensors], Results] | None = None) -> Results:
    """The results of a step on the whole ``values``; ``piece`` runs one microbatch (default: its graph)."""
    known = dict(values)
    if made.prelude is not None:
        known |= {name: value for (_, name), value in interpret(made.prelude, known).items() if value is not None}
    run = piece or (lambda given: interpret(made.graph, given))
    found = [run(_piece(made, known, index)) for index in range(made.count)]
    return {key: _combined([results[key] for results in found], how) for key, how in made.combine.items()}


def random_state(index: int) -> torch.Tensor:
    """What draws of microbatch ``index`` are a function of."""
    state = STATE.clone()
    state[3] = index
    return state


def _piece(made: Microbatched, values: Tensors, index: int) -> Tensors:
    divided = {target: dim for target, dim in made.inputs.items() if dim is not None}
    values = {**values, "random": random_state(index)}
    return {**values, **{t: values[t].chunk(made.count, dim)[index] for t, dim in divided.items()}}


def _combined(parts: list[torch.Tensor | None], how: str) -> torch.Tensor | None:
    tensors = [part for part in parts if part is not None]
    if not tensors:
        return None
    if how == "same":
        return tensors[-1]
    return torch.stack(tensors).sum(0) if how == "sum" else torch.cat(tensors, int(how.removeprefix("concatenate:")))
