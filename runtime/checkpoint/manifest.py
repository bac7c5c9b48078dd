"""The manifest of a checkpoint: sizes and hashes of its files. It is written last, so a folder with a valid manifest is
complete, and one without is not a checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import CheckpointError

# The name of the file.
MANIFEST = "manifest.json"
# Of the form of a checkpoint's files: raised by hand when an older autopar would misread them.
VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint: its name inside the folder, its size, and its SHA-256 in hexadecimal digits."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """``number``: greater than those of all checkpoints that were in the folder before, which says better than steps
    (which begin again at an older checkpoint) or clocks (which may go back) what is newest. ``saved``: seconds since
    1970 at which it was written; ``files`` by name."""

    step: int
    number: int
    saved: float
    files: Mapping[str, FileRecord]

    def to_json(self) -> str:
        """The text of the file. Its last entry is the hash of all others."""
        body = {
            "autopar_checkpoint": VERSION,
            "step": self.step,
            "number": self.number,
            "saved": self.saved,
            "files": {file.name: [file.bytes, file.sha256] for file in self.files.values()},
        }
        return json.dumps({**body, "sha256": _digest(body)}, indent=1)

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(file.bytes for file in self.files.values())


def read_manifest(text: str | bytes) -> Manifest:
    """Reads a manifest. Raises :class:`CheckpointError` if it is not one, or not as it was written."""
    try:
        body = json.loads(text)
        digest = body.pop("sha256")
        if body["autopar_checkpoint"] != VERSION:
            raise CheckpointError(
                f"the checkpoint has the form {body['autopar_checkpoint']!r}, and this autopar reads {VERSION}: load "
                "it with the version that wrote it"
            )
        if digest != _digest(body):
            raise CheckpointError("its content is not that which was hashed when it was written")
        return _checked(body)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"this is not a manifest: {type(error).__name__}: {error}") from error


def _checked(body: dict[str, Any]) -> Manifest:
    files = [FileRecord(name, size, digest) for name, (size, digest) in body["files"].items()]
    for file in files:
        if not _NAME.fullmatch(file.name) or file.name == MANIFEST:
            raise CheckpointError(f"{file.name!r} is not the name of a file of a checkpoint")
        if type(file.bytes) is not int or file.bytes < 0 or not _DIGEST.fullmatch(file.sha256):
            raise CheckpointError(f"the manifest gives no valid size and hash of {file.name}")
    step, number, saved = body["step"], body["number"], body["saved"]
    if type(step) is not int or type(number) is not int or step < 0 or not isinstance(saved, (int, float)):
        raise CheckpointError(f"the manifest gives the step {step!r} and the number {number!r}")
    return Manifest(step, number, float(saved), {file.name: file for file in files})


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
