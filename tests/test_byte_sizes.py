"""Sizes in bytes as text: of the command line, of options, of what-if."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import autopar
from autopar.byte_sizes import parse_bytes
from autopar.errors import OptionsError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *(("1024B", 1024), ("10GiB", 10 * 2**30), ("80 GB", 80 * 10**9), ("1.5e9b", 1_500_000_000), ("0.5KiB", 512)),
        *((".5GB", 5 * 10**8), ("5.GB", 5 * 10**9), ("1e+9B", 10**9), ("2E9 B", 2 * 10**9), ("4e-1 kb", 400)),
    ],
)
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count
    assert autopar.Options(memory_limit=text) == autopar.Options(memory_limit=count)


@pytest.mark.parametrize(
    "text", ["", "GiB", "10 gigs", "-1", "ten", "1e999", "\uff18\uff10GB", ".GB", "nan", "10\u017fB", "5KiB iB"]
)
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


def test_a_bare_prefix_may_be_either() -> None:
    with pytest.raises(OptionsError) as error:
        autopar.Options(memory_limit="40g")
    assert str(error.value) == (
        "memory_limit='40g' may be 40GB (40,000,000,000 bytes) or 40GiB (42,949,672,960 bytes): write which"
    )


@pytest.mark.parametrize(("text", "number"), [("40", "40"), (" 1.5e9 ", "1.5e9")])
def test_a_bare_number_may_be_anything(text: str, number: str) -> None:
    said = f"has no unit: write {number}GiB, {number}GB or, for bytes, {number}B"
    with pytest.raises(OptionsError, match=re.escape(f"memory_limit={text!r} {said}")):
        autopar.Options(memory_limit=text)
    assert parse_bytes(f"{number}B") == float(number) == autopar.Options(memory_limit=int(float(number))).memory_limit
