"""Exit statuses of commands."""

from __future__ import annotations

# Success; a check failed (gradients differ, a script failed, plans differ); bad usage, or an error of autopar's own.
OK, FAILED, USAGE = 0, 1, 2
