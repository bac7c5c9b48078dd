"""What the programs of strangers are run by."""

from __future__ import annotations

import os

import pytest

from tests.stranger.fresh_environment import fresh_environment
from tests.stranger.stranger_user import Stranger


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    base = tmp_path_factory.getbasetemp()
    # Workers of pytest-xdist have a folder each below one of the session.
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    return Stranger(fresh_environment(shared / "stranger"), tmp_path_factory.mktemp("runs"))
