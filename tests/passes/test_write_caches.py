"""Rows written into a cache are named so; what is no cache, or is read as it was, is left alone."""

from __future__ import annotations

import pytest

from autopar.passes.normalise.write_caches import WriteCaches
from tests.helpers.pass_text import check

CACHE = """graph(b=4)
%c: f32[b, 2, 8, 3] = cache("c")
%at: i64[1] = input("at")
%x: f32[b, 2, 1, 3] = input("x")
%new: f32[b, 2, 8, 3] = aten.index_copy.default(%c, 2, %at, %x)
%y: f32[b, 2, 8, 3] = aten.relu.default(%new)
return output "0" = %y
return mutation "c" = %new
"""


def test_the_write_is_named() -> None:
    check(WriteCaches(), CACHE, CACHE.replace("aten.index_copy", "autopar.write_rows"))


@pytest.mark.parametrize("other", [('cache("c")', 'input("c")'), ("relu.default(%new)", "relu.default(%c)")])
def test_other_writes_stay(other: tuple[str, str]) -> None:
    text = CACHE.replace(*other)
    check(WriteCaches(), text, text)
