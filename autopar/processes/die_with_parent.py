"""Replaces itself by a command that the kernel kills when its parent dies.

``python -I -S die_with_parent.py PARENT COMMAND...``
``autopar run`` starts each rank through it, so that nothing is left behind when the launcher itself is killed. It runs
as a file, without the rest of autopar, since it costs every start of a rank.
"""

import ctypes
import os
import signal
import sys

# From Linux's sys/prctl.h. The setting survives exec.
_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Becomes ``command``; ``parent``: the id of the process that must be alive, which may have died by now."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
