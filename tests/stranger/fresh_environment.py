"""A virtual environment outside the checkout with the built wheel in it, and the session's other packages."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from tests.helpers.built_wheel import build_wheel

PIP_SECONDS = 120


@dataclass(frozen=True)
class FreshEnvironment:
    """``folder`` is the virtual environment, ``cache`` what its programs use as ``AUTOPAR_CACHE``: empty when the
    test session begins, kept between programs, as on a user's machine."""

    folder: Path
    cache: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def command(self, name: str) -> Path:
        """A command that the wheel installs."""
        return self.folder / "bin" / name


def fresh_environment(shared: Path) -> FreshEnvironment:
    """The environment in the folder ``shared``, made by whichever process of the test session comes first."""
    made = FreshEnvironment(shared / "environment", shared / "cache")
    done = shared / "environment.done"
    shared.mkdir(parents=True, exist_ok=True)
    with FileLock(shared / "environment.lock"):
        if not done.exists():
            _make(made, build_wheel(shared))
            done.touch()
    return made


def _make(environment: FreshEnvironment, wheel: Path) -> None:
    environment.cache.mkdir()
    _run(sys.executable, "-m", "venv", "--without-pip", environment.folder)
    (site,) = environment.folder.glob("lib/python*/site-packages")
    # Paths alone: the .pth files in these folders, among them the finder of an editable autopar, are not read.
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "session.pth").write_text("".join(f"{path}\n" for path in others))
    install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", wheel]
    _run(sys.executable, "-m", "pip", "--python", environment.python, *install)
    _install_torchrun(environment)
    found = _run(environment.python, "-c", "import autopar; print(autopar.__file__)").strip()
    assert Path(found).is_relative_to(site), f"{found} is not from the wheel"


def _install_torchrun(environment: FreshEnvironment) -> None:
    """The command that torch would have installed with itself."""
    command = environment.command("torchrun")
    command.write_text(f"#!{environment.python}\nfrom torch.distributed.run import main\n\nmain()\n")
    command.chmod(0o755)


def _run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd="/", capture_output=True, text=True, timeout=PIP_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
