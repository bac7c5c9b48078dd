"""What to do where a model is evaluated first, though training is planned by its first call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autopar.errors import OptionsError, PlanMismatchError
from autopar.planner.prepare import Prepared

_ADVICE = (
    "This is the first call of the model, from which its training is planned, and it computes no loss: before such a "
    "call give parallelize(example_inputs=...) a batch with labels (with loss_fn, targets= too), or call "
    "model.step(...) once. Later calls need no labels"
)


@contextmanager
def evaluated_first(base: Prepared) -> Iterator[None]:
    """Adds this to errors of a plan for a first call that has no loss."""
    try:
        yield
    except (OptionsError, PlanMismatchError) as error:
        if base.loss is not None:
            raise
        raise type(error)(f"{error}\n{_ADVICE}") from error
