"""Pads sequences: to one length on all ranks that read parts of a batch, and to a multiple, so that batches of many
lengths share a few programs.

Sequences are inputs of two dims, samples and positions, under the names that transformers gives them (:data:`FILLS`).
What is added is ignored: labels of -100, and positions that the attention mask excludes. A mask of the real positions
is added where the model takes one and the batch has none.
"""

from __future__ import annotations

import inspect
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import OptionsError
from autopar.runtime.torch_internals.dtensors import local_tensor
from autopar.torch_internals.fake_tensors import FakeTensor

# The sequences that are padded, and with what; None: with the id of padding. The names are those of transformers'
# models and of the collators of transformers and TRL; -100 is what torch's and transformers' losses ignore.
FILLS: Mapping[str, int | None] = {
    "input_ids": None,
    "decoder_input_ids": None,
    "attention_mask": 0,
    "decoder_attention_mask": 0,
    "labels": -100,
    "shift_labels": -100,
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
    "position_ids": 0,
    "completion_mask": 0,
    "assistant_masks": 0,
    "special_tokens_mask": 1,
}
_MASK, _IDS = "attention_mask", "input_ids"
_RECORD = struct.Struct(f"??{len(FILLS)}i")


@dataclass(frozen=True)
class SequencePadding:
    """How sequences of a model are padded: to a multiple of ``multiple`` (None: no further than to the longest rank's),
    ids with ``token``. ``takes_mask``: whether forward has an attention mask; ``causal``: whether its class says that
    positions do not see later ones; ``decodes``: whether labels may be longer or shorter than what is encoded;
    ``reserved``: whether the configuration reserves ``token`` for padding."""

    multiple: int | None
    token: int
    takes_mask: bool
    causal: bool
    decodes: bool = False
    reserved: bool = False

    @classmethod
    def of(cls, module: nn.Module, multiple: int | None) -> SequencePadding:
        """That of ``module``; the id of padding is the one of its configuration, or 0."""
        config = getattr(module, "config", None)
        token: Any = getattr(config, "pad_token_id", None)
        try:
            takes_mask = _MASK in inspect.signature(module.forward).parameters
        except (TypeError, ValueError):
            takes_mask = False
        causal = re.search(r"CausalLM|LMHead", type(module).__name__) is not None
        decodes = bool(getattr(config, "is_encoder_decoder", False))
        reserved = isinstance(token, int) and token >= 0
        return cls(multiple, int(token) if reserved else 0, takes_mask, causal, decodes, reserved)

    def width(self, longest: int) -> int:
        """The length to which sequences of at most ``longest`` are padded."""
        return longest if self.multiple is None else -(-longest // self.multiple) * self.multiple

    def record(self, names: Sequence[str], leaves: Sequence[Any]) -> bytes:
        """What ranks tell each other: the lengths of the sequences, whether padding is on the left, and whether ids
        without a mask have padding among them."""
        sequences = dict(_sequences(names, leaves))
        mask, ids = sequences.get(_MASK), sequences.get(_IDS)
        left = _is_seen(mask) and bool(((mask[:, 0] == 0) & (mask[:, -1] != 0)).any())
        unclear = self.reserved and mask is None and _is_seen(ids) and bool((ids == self.token).any())
        widths = [sequences[key].shape[1] if key in sequences else 0 for key in FILLS]
        return _RECORD.pack(left, unclear, *widths)

    def plan(self, records: Sequence[bytes]) -> Widths:
        """What is done to the sequences, from the records of all ranks."""
        unpacked = [_RECORD.unpack(record) for record in records]
        columns = [[each[2 + place] for each in unpacked] for place in range(len(FILLS))]
        longest = {key: max(column) for key, column in zip(FILLS, columns, strict=True)}
        ragged = any(
            width != longest[key] for key, column in zip(FILLS, columns, strict=True) for width in column if width
        )
        left, unclear = (any(each[place] for each in unpacked) for place in range(2))
        return Widths(self, longest, ragged, left, unclear)


@dataclass(frozen=True)
class Widths:
    """The ``longest`` of each kind of sequence on any rank (0: there is none); ``ragged``: whether ranks differ;
    ``left``: whether what ranks lack is added on the left, where their own padding is; ``unclear``: whether ids without
    a mask have padding among them."""

    padding: SequencePadding
    longest: Mapping[str, int]
    ragged: bool
    left: bool
    unclear: bool = False

    @property
    def pads(self) -> bool:
        """Whether any sequence is made longer, on some rank."""
        return self.ragged or any(self.padding.width(longest) != longest for longest in self.longest.values())

    @property
    def _labels_are_sequences(self) -> bool:
        """Whether each position has a label: not, for example, if each sample has a label for every class."""
        return self.padding.decodes or self.longest[_IDS] in (0, self.longest["labels"])

    def wants_mask(self, names: Sequence[str], leaves: Sequence[Any]) -> bool:
        """Whether a mask of the real positions has to be added. Raises :class:`OptionsError` if one is needed and
        cannot be made."""
        keys = {key_of(name) for name, leaf in zip(names, leaves, strict=True) if leaf is not None}
        if _MASK in keys or _IDS not in keys or not self.longest[_IDS]:
            return False
        looks_ahead = self.padding.takes_mask and not self.padding.causal
        if "position_ids" in keys:  # Several texts in a row may be told apart by their positions.
            if self.pads and looks_ahead:
                raise OptionsError(_needs_mask("position_ids"))
            return False
        clear = not (looks_ahead and self.unclear)  # Models differ in what they take ids of padding for.
        if self.pads and not clear:
            raise OptionsError(_needs_mask(f"ids of padding ({self.padding.token}, the configuration's pad_token_id)"))
        return self.padding.takes_mask and (self.pads or (self.padding.multiple is not None and clear))

    def with_mask(self) -> Widths:
        """These, for a batch that has a mask as long as its ids."""
        return replace(self, longest={**self.longest, _MASK: self.longest[_IDS]})

    def apply(self, name: str, leaf: Any) -> Any:
        """``leaf``, as long as on all ranks and a multiple."""
        key = key_of(name)
        if not _is_sequence(key, leaf) or (key == "labels" and not self._labels_are_sequences):
            return leaf
        fill = FILLS[key]
        value = self.padding.token if fill is None else fill
        longest = self.longest[key]
        before = longest - leaf.shape[1] if self.left else 0
        after = self.padding.width(longest) - leaf.shape[1] - before
        return leaf if not before and not after else padded(leaf, before, after, value)


def padded(tensor: torch.Tensor, before: int, after: int, value: int) -> torch.Tensor:
    """``tensor`` with that many columns of ``value`` more; a DTensor's samples, not its columns, may be sharded."""
    if not isinstance(tensor, DTensor):
        return nn.functional.pad(tensor, (before, after), value=value)
    if any(placement.is_shard(1) or placement.is_partial() for placement in tensor.placements):
        raise OptionsError("sequences that are sharded over ranks cannot be padded: pad them before they are")
    local = nn.functional.pad(local_tensor(tensor), (before, after), value=value)
    shape = torch.Size((tensor.shape[0], local.shape[1]))
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=(shape[1], 1)
    )


def key_of(name: str) -> str:
    """The last word of the name of an input: ``labels`` of ``batch['labels']``."""
    words = re.findall(r"[A-Za-z_]\w*", name)
    return words[-1] if words else ""


def _needs_mask(found: str) -> str:
    return (
        f"sequences have to be padded, and the batch has {found} but no attention_mask, which says which positions are "
        "real: have the collate function give attention_mask"
    )


def _is_seen(leaf: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether there is something to look at here: a plan may be made from tensors without values."""
    return leaf is not None and leaf.numel() > 0 and not (leaf.is_meta or isinstance(leaf, (DTensor, FakeTensor)))


def _is_sequence(key: str, leaf: object) -> bool:
    return (
        key in FILLS
        and isinstance(leaf, torch.Tensor)
        and leaf.dim() == 2
        and not (leaf.is_floating_point() and key not in (_MASK, "decoder_attention_mask"))
    )


def _sequences(names: Sequence[str], leaves: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
    keyed = ((key_of(name), leaf) for name, leaf in zip(names, leaves, strict=True))
    return [(key, leaf) for key, leaf in keyed if _is_sequence(key, leaf)]
