"""What decides a solution where the device has any amount of memory: the seconds of choices and transfers; and what
decides it with the limit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from .problem import Problem, without_needless_host


def cost_digest(problem: Problem) -> str:
    """A hash that is equal for problems with the same solutions if the device's memory is unlimited: whatever the bytes
    of their choices, as of stages that hold other numbers of microbatches."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(without_needless_host(problem)):
        digest.update(part)
    return digest.hexdigest()


def digest_without_limit(problem: Problem) -> str:
    """A hash that is equal for problems that differ at most in the limit of the device's memory, and its price."""
    digest = hashlib.blake2b(cost_digest(problem).encode(), digest_size=16)
    digest.update(repr((problem.host_limit, problem.memory_fixed)).encode())
    for group in problem.groups:
        for array in (group.memory, group.temporary, group.host):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _parts(problem: Problem) -> Iterator[bytes]:
    yield repr((len(problem.groups), problem.host_limit)).encode()
    for group in problem.groups:
        yield repr(group.cost.shape).encode()
        yield np.ascontiguousarray(group.cost).tobytes()
        if np.isfinite(problem.host_limit):
            yield np.ascontiguousarray(group.host).tobytes()
    for transfer in problem.transfers:
        yield repr((transfer.producer, transfer.consumers, transfer.cost.shape)).encode()
        for array in (transfer.source, *transfer.targets, transfer.cost):
            yield np.ascontiguousarray(array).tobytes()
    for window in problem.windows:
        yield repr((window.hidden, sorted(window.groups.items()), sorted(window.transfers.items()))).encode()
