"""``python -m autopar``: the command line."""

from __future__ import annotations

import sys

from autopar.cli.parser import main

if __name__ == "__main__":
    sys.exit(main())
