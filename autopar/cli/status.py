"""Exit statuses of commands."""

from __future__ import annotations

# Well; a check failed (gradients differ, a script failed, plans differ); bad usage, or what autopar raises on purpose.
OK, FAILED, USAGE = 0, 1, 2
