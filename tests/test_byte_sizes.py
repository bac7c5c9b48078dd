"""Sizes in bytes as text: of the command line, of options, of what-if."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar.byte_sizes import parse_bytes
from autopar.errors import OptionsError


@pytest.mark.parametrize(
    ("text", "count"),
    [("1024", 1024), ("10GiB", 10 * 2**30), ("80 GB", 80 * 10**9), ("1.5e9", 1_500_000_000), ("0.5KiB", 512)],
)
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count
    assert autopar.Options(memory_limit=text) == autopar.Options(memory_limit=count)


@pytest.mark.parametrize("text", ["", "GiB", "10 gigs", "-1", "ten", "1e999"])
def test_no_bytes(text: str) -> None:
    with pytest.raises(OptionsError, match="10GiB"):
        parse_bytes(text)
    with pytest.raises(OptionsError, match=r"memory_limit=.*10GiB"):
        autopar.Options(memory_limit=text)


def test_options_keep_numbers() -> None:
    options = replace(autopar.Options(memory_limit="40GiB"), seed=1)
    assert options.memory_limit == options.memory_bytes == 40 * 2**30
    assert autopar.Options().memory_bytes is None
    with pytest.raises(OptionsError, match="40GiB"):
        autopar.Options(memory_limit=0)
    with pytest.raises(OptionsError, match="40GiB"):
        autopar.Options(memory_limit="0 GiB")
