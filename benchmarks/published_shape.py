"""Dims of the decoders that published rows describe, and the reason where a row describes none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Vocabularies are padded to a multiple of this, as training libraries do so that it divides among devices.
PADDED = 128


class NotExpressible(Exception):
    """Why a row is skipped."""


def number(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number of a row whose fields hold what they may (:func:`.published_fields.check_fields`); where it is not
    given, or given as 0, ``default``. Raises :class:`NotExpressible` if there is none then."""
    value = fields.get(name) or default
    if value is None:
        raise NotExpressible(f"{name} is not given")
    return int(value)


def filled(row: Mapping[str, Any], **parts: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with these fields where it has none."""
    added = {
        part: {**more, **{name: value for name, value in row[part].items() if value is not None}}
        for part, more in parts.items()
    }
    return {**row, **added}


@dataclass(frozen=True)
class Experts:
    """``number`` experts of hidden width ``ffn``, ``chosen`` for each token, and ``shared`` ones for all, in every
    ``every``-th layer but the first ``dense``. ``group``: tokens of which each group has slots of its own, which are
    reached by products with masks (GShard, arXiv 2006.16668); 0: rows are sent by their number. ``wide_masks``: whether
    these are made in fp32."""

    number: int
    chosen: int
    ffn: int
    shared: int = 0
    dense: int = 0
    every: int = 1
    group: int = 0
    wide_masks: bool = False

    def in_layer(self, layer: int) -> bool:
        return layer >= self.dense and (layer + 1) % self.every == 0


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries, and keys with values, go through a narrow
    projection. Rows do not give its dims: these are those of DeepSeek-V3, which Kimi K2 has too."""

    query: int = 1536
    key_value: int = 512
    head: int = 128
    rotary: int = 64
    value: int = 128


@dataclass(frozen=True)
class Shape:
    """The dims of a decoder; ``flash``: attention is one kernel, and what is recomputed of it is not its scores;
    ``window``: every other layer (``window_every``) attends to so many tokens only; ``upcast``: scores written out are
    normalised in fp32; ``dropout``: of embedding, scores written out, and what attention and
    feed-forward add; ``beyond``: how many tokens after the next one are predicted too, each by a layer more;
    ``one_hot``: embeddings are looked up by products with one-hot rows; ``normed_heads``: the queries and keys of each
    head are normalised; ``attention_bias``: projections of gated models have biases, too."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab: int
    seq: int
    flash: bool
    experts: Experts | None = None
    latent: Latent | None = None
    window: int = 0
    window_every: int = 1
    upcast: bool = False
    dropout: bool = False
    beyond: int = 0
    one_hot: bool = False
    normed_heads: bool = False
    attention_bias: bool = False

    @staticmethod
    def of(
        model: Mapping[str, Any], *, flash: bool, upcast: bool = False, dropout: bool = False, beyond: int = 0
    ) -> Shape:
        """Raises :class:`NotExpressible` for what is no decoder, or lacks a dim."""
        missing = [name for name in ("layers", "hidden", "heads", "seq", "vocab") if not model.get(name)]
        if missing:
            raise NotExpressible(f"of the model {', '.join(missing)} {'are' if missing[1:] else 'is'} not given")
        if model.get("image"):
            raise NotExpressible(f"model.image is {model['image']}: no decoder of text")
        hidden, heads = number(model, "hidden"), number(model, "heads")
        kv_heads, ffn = number(model, "kv_heads", heads), number(model, "ffn", 4 * hidden)
        if not model.get("head_dim") and hidden % heads:
            raise NotExpressible(f"hidden {hidden} does not divide among {heads} heads, and head_dim is not given")
        if heads % kv_heads:
            raise NotExpressible(f"{heads} heads do not divide among {kv_heads} of keys (kv_heads)")
        gated = model.get("mlp") in ("swiglu", "geglu") or (model.get("mlp") is None and bool(model.get("experts")))
        width = number(model, "head_dim", hidden // heads)
        if gated and width % 2:
            raise NotExpressible(f"heads of {width} are no pairs, which rotary positions turn")
        window, every = _window(model)
        return Shape(
            layers=number(model, "layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=width,
            ffn=ffn,
            gated=gated,
            vocab=-(-number(model, "vocab") // PADDED) * PADDED,
            seq=number(model, "seq"),
            flash=flash or bool(window),
            experts=_experts(model, ffn),
            latent=Latent() if model.get("attention") == "MLA" else None,
            window=window,
            window_every=every,
            upcast=upcast,
            dropout=dropout,
            beyond=beyond,
            one_hot=bool(model.get("one_hot_embedding")),
            normed_heads=bool(model.get("normed_heads")),
            attention_bias=bool(model.get("attention_bias")),
        )


def _window(model: Mapping[str, Any]) -> tuple[int, int]:
    """The window of attention, and in every which layer it is so."""
    said = model.get("attention")
    if not said or said == "MLA":
        return 0, 1
    found = re.search(r"sliding window (\d+)", str(said))
    if not found or not int(found[1]):
        raise NotExpressible(f"{said} attention: only MLA and a sliding window of so many tokens are known")
    window, seq = int(found[1]), number(model, "seq")
    if seq % window:
        raise NotExpressible(f"a sequence of {seq} does not divide into windows of {window}")
    return window, 2 if "alternating" in str(said) else 1


def _experts(model: Mapping[str, Any], ffn: int) -> Experts | None:
    said = model.get("experts")
    every = model.get("experts_every_other_layer")
    if not said and not every:
        return None
    if isinstance(said, Mapping):
        fields: Mapping[str, Any] = said
    else:
        fields = {"n": said or every, "top_k": model.get("top_k")}
    if not fields.get("n") or not fields.get("top_k"):
        absent = "n, how many experts there are," if not fields.get("n") else "top_k, how many experts a token goes to,"
        raise NotExpressible(f"of the model's experts {absent} is not given")
    found = Experts(
        number=number(fields, "n"),
        chosen=number(fields, "top_k"),
        ffn=number(fields, "ffn", ffn),
        shared=int(fields.get("shared") or 0),
        dense=int(model.get("dense_layers") or 0),
        every=2 if every else number(fields, "every", 1),
        group=number(model, "expert_group_size") if model.get("expert_group_size") else 0,
        wide_masks=bool(model.get("wide_masks")),
    )
    if found.chosen > found.number:
        raise NotExpressible(f"{found.chosen} of {found.number} experts are chosen")
    return found
