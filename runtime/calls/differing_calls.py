"""Error messages for ranks that make different calls, or the same call with different values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from autopar.ir.node import TensorType
from autopar.runtime.comm.minority import minority, named

from .kind import CallKind

_SAME_BATCH = (
    "Every rank must pass the same global batch, of which autopar takes each rank's part.\n"
    "- If each rank reads samples of its own (a DistributedSampler, say), join them, here and wherever the model is "
    "called: model.step(*model.from_local(x, y)), or model.step(**model.from_local(**batch)).\n"
    "- Otherwise let every rank read the same samples in the same order: no sampler that divides them among ranks, and "
    "the same seed in each loader that shuffles or augments; call torch.manual_seed(0) before samples are drawn, by "
    "torch.randint and the like."
)
_SAME_CALLS = (
    "Every rank must make the same calls in the same order, evaluation too: ranks compute each of them together. Move "
    "the call out of a branch such as `if rank == 0:`, and only print or save inside it."
)
_SAME_ATTRIBUTES = (
    "Something else that forward reads (an attribute of a module, a Python number) differs between the ranks: set it "
    "alike on all of them."
)
_FLAGS = ("training mode of its modules", "frozen parameters")
_SWITCH = "Options(check_inputs='never') leaves this comparison out."


@dataclass(frozen=True)
class Description:
    """A call in plain values, which ranks can exchange: inputs by name, other properties by topic, and the number of
    its program (-1: a new one, for the reason ``because``)."""

    inputs: Mapping[str, str]
    others: Mapping[str, object]
    program: int
    because: str

    @classmethod
    def of(cls, kind: CallKind, layouts: Mapping[str, str], program: int, because: str) -> Description:
        inputs = {
            name: f"{leaf}{layout and f' as a {layout}'}"
            for (name, layout), leaf in zip(layouts.items(), kind.leaves, strict=True)
        }
        others = {
            "the containers of its inputs": " ".join(kind.structure.split()),
            "what is wanted": _wanted(kind),
            "training mode of its modules": kind.modes,
            "frozen parameters": tuple(not wanted for wanted in kind.wanted),
            "torch's default dtype and autocast": str(kind.around),
            "hooks of its modules": tuple(hook.text for hook in kind.hooks),
        }
        return cls(inputs, others, program, because)


def _wanted(kind: CallKind) -> str:
    if kind.grad:
        return "the loss and gradients" if kind.outputs == "loss" else "outputs with gradients"
    return "outputs without gradients"


def explain_kind(ranks: Sequence[int], descriptions: Sequence[Description]) -> str:
    """The message about calls of different kinds, the same on all ranks."""
    lines = _input_lines(ranks, descriptions)
    advice = _SAME_BATCH if lines else _SAME_CALLS
    lines += _other_lines(ranks, descriptions)
    if not lines:
        lines, advice = _programs(ranks, descriptions), _SAME_ATTRIBUTES
    listed = "".join(f"\n  {line}" for line in lines)
    odd, others = ([ranks[at] for at in places] for places in minority([repr(call) for call in descriptions]))
    return f"ranks make different calls of the model, {named(odd)} another than {named(others)}:{listed}\n{advice}"


def _input_lines(ranks: Sequence[int], descriptions: Sequence[Description]) -> list[str]:
    names = dict.fromkeys(name for call in descriptions for name in call.inputs)
    by_input = [
        _groups(f"input {name}", ranks, [call.inputs.get(name, "not given") for call in descriptions]) for name in names
    ]
    if any(by_input):
        return [line for lines in by_input for line in lines]
    about = "the containers of its inputs"
    return _groups(about, ranks, [call.others[about] for call in descriptions])


def _other_lines(ranks: Sequence[int], descriptions: Sequence[Description]) -> list[str]:
    lines = []
    for about in descriptions[0].others:
        values = [call.others[about] for call in descriptions]
        if about in _FLAGS:
            lines += _flags(about, ranks, values)
        elif about != "the containers of its inputs":
            lines += _groups(about, ranks, values)
    return lines


def _groups(about: str, ranks: Sequence[int], values: Sequence[object]) -> list[str]:
    """One line that says which ranks have which value; no line if all have the same."""
    sets: dict[object, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        sets.setdefault(value, []).append(rank)
    if len(sets) == 1:
        return []
    return [f"{about}: " + "; ".join(f"{value} on {named(own)}" for value, own in sets.items())]


def _flags(about: str, ranks: Sequence[int], values: Sequence[object]) -> list[str]:
    if len(set(values)) == 1:
        return []
    counts = [sum(flags) if isinstance(flags, tuple) else 0 for flags in values]
    if len(set(counts)) == 1:
        return [f"{about}: different ones, {counts[0]} on each rank"]
    total = len(values[0]) if isinstance(values[0], tuple) else 0
    return _groups(about, ranks, [f"{count} of {total}" for count in counts])


def _programs(ranks: Sequence[int], descriptions: Sequence[Description]) -> list[str]:
    """The programs of calls with equal inputs, which differ in something else that forward reads."""
    texts = [
        f"a new program{call.because and f' ({call.because})'}" if call.program < 0 else f"program {call.program}"
        for call in descriptions
    ]
    return _groups("the same inputs run", ranks, texts)


def explain_content(name: str, tensor: torch.Tensor, ranks: Sequence[int]) -> str:
    """The message about an input whose values differ: on all ``ranks`` but the first, which stands for the others."""
    kind = TensorType(tuple(tensor.shape), tensor.dtype)
    others = f"{named(ranks[1:])} {'has' if len(ranks) == 2 else 'have'}"
    if isinstance(tensor, DTensor):
        return (
            f"input {name} ({kind}, placed as {tuple(map(str, tensor.placements))}): {others} other values than rank "
            f"{ranks[0]} of a part that these ranks hold in common. Read the same samples on them, augmented alike; "
            "or let each rank read samples of its own and join them with model.from_local(...), which gathers what "
            f"ranks share.\n{_SWITCH}"
        )
    return f"input {name} ({kind}): {others} other values than rank {ranks[0]}. {_SAME_BATCH}\n{_SWITCH}"
