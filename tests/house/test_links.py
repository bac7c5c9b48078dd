"""Links between the documents, and to files of the repository, lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .sources import ROOT

DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchor(heading: str) -> str:
    """The name that GitHub and MyST give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken(document: Path) -> list[str]:
    found = []
    for link in LINK.findall(re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, wanted = link.partition("#")
        target = document if not name else (document.parent / name).resolve()
        if not target.exists() or (
            wanted and wanted not in map(anchor, HEADING.findall(target.read_text(encoding="utf-8")))
        ):
            found.append(link)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    assert broken(document) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("# One two\n[a](b.md) [b](a.md#one-two) [c](#three) ![d](no.svg) [e](https://example.org)\n")
    assert broken(document) == ["b.md", "#three", "no.svg"]


def test_every_document_is_in_the_table_of_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    names = {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md")}
    built = {name for name in names if name.startswith("_build")}
    lost = {name for name in names - built - {"index"} if f"\n{name}\n" not in index}
    assert lost == set(), "add them to a toctree of docs/index.md"
