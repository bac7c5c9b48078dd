"""The wheel of the repository, as `pip install` would take it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = {
    "autopar": "autopar",
    "passes": "autopar/passes",
    "cost": "autopar/cost",
    "runtime": "autopar/runtime",
}


def build_wheel(folder: Path) -> Path:
    """Builds the sdist, and from it the wheel, into the existing ``folder``; from a copy there, so that nothing is left
    in the repository."""
    source, target = folder / "source", folder / "wheel"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(source)]
    build = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert build.returncode == 0, build.stdout + build.stderr
    (built,) = target.glob("*.whl")
    return built
