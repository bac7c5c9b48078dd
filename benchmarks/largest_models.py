"""The largest models that were published with their devices and layouts, for benchmarks of planning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.layout import Layout

from .published_shape import Experts, Shape


@dataclass(frozen=True)
class Case:
    """A model, its devices and batch, and the layout that was published."""

    shape: Shape
    cluster: str
    devices: int
    batch: int
    published: Layout
    source: str


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 51200) -> Shape:
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        gated=False,
        vocab=vocab,
        seq=2048,
        flash=False,
    )


CASES: Mapping[str, Case] = {
    "GPT-3 175B": Case(
        _gpt(96, 12288, 96),
        "dgx-a100-80gb",
        1024,
        1536,
        Layout(8, 16, 8, recompute="full"),
        "Narayanan et al. 2021",
    ),
    "MT-NLG 530B": Case(
        _gpt(105, 20480, 128),
        "dgx-a100-80gb",
        2240,
        1920,
        Layout(8, 35, 8, recompute="full", zero=1),
        "Smith et al. 2022",
    ),
    "GPT 1T": Case(
        _gpt(128, 25600, 160),
        "dgx-a100-80gb",
        3072,
        3072,
        Layout(8, 64, 6, recompute="full"),
        "Narayanan et al. 2021, table 1",
    ),
    "Llama 3 405B": Case(
        Shape(
            layers=126,
            hidden=16384,
            heads=128,
            kv_heads=8,
            head_dim=128,
            ffn=53248,
            gated=True,
            vocab=128256,
            seq=8192,
            flash=True,
        ),
        "h100-clos-24k",
        16384,
        2048,
        # Chunks are not said; with one layer less on the first and the last stage 126 are 128, eight for each.
        Layout(8, 16, 128, interleave=8, sequence_parallel=True, zero=2),
        "Llama Team 2024, table 4",
    ),
    # Switch-C has 15 encoder and 15 decoder layers, 2048 experts in each, and was trained with expert parallelism
    # alone; here all 30 are one decoder, and no layout pads experts (the paper has 1.25 times as many slots).
    "Switch 1.6T": Case(
        replace(
            _gpt(30, 2080, 32, vocab=32128),
            heads=32,
            head_dim=64,
            kv_heads=32,
            ffn=6144,
            seq=512,
            flash=True,
            experts=Experts(2048, 1, 6144),
        ),
        "dgx-a100-80gb",
        2048,
        2048,
        Layout(1, 1, 2048, expert=2048, zero=1),
        "Fedus, Zoph and Shazeer 2022, table 9",
    ),
}
