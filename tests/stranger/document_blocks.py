"""The blocks of code of a document."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w*|\{[\w-]+\})\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """The ``line`` of its first word in ``document`` (a path in the repository)."""

    document: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(root: Path) -> list[Block]:
    """Those of README and of every document, in order."""
    found = []
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        text = path.read_text()
        for match in _FENCE.finditer(text):
            if match[1].startswith("{"):  # A directive of MyST.
                continue
            line = text.count("\n", 0, match.start(2)) + 1
            found.append(Block(str(path.relative_to(root)), line, match[1], match[2]))
    return found


def commands(block: Block) -> list[str]:
    """The commands of a block for a shell, without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [shlex.join(command) for command in words if command]
