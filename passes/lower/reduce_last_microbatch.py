"""The last microbatch of a chunk: its gradients set out for where they rest as soon as they are made.

What remains to be done when the last gradient is made, to wait for the buckets that are still on their way, is a
section of its own: a rank of a pipeline may have other things to compute meanwhile. Where it has, or has a gradient to
send which another stage waits for, this microbatch waits for no bucket itself: it starts as many as may be on their way
at once, and the others leave later.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.node import Output
from autopar.ir.program import Section

from .emit import Buckets, Emitter
from .lower import Lowering, send_gradient
from .split_section import split_after


def reducing(job: Lowering, section: Section, gradients: Sequence[Output], waits: bool) -> tuple[Section, Section]:
    """``section``, whose last outputs are the raw ``gradients``, in two. The first starts a bucket when it is full, and
    ends when the last gradient is made; the second, called ``reduce``, takes what the first returns behind its other
    outputs, and returns gradients as stored. ``waits``: whether the first may wait for a bucket to start another."""
    count = len(section.outputs) - len(gradients)
    emitter = Emitter(job.mesh, job.coordinate)
    emitter.taken.update(section.inputs, (instruction.name for instruction in section.instructions))
    buckets = Buckets(emitter, job.bucket_bytes, "gradients", waits)
    made_by: dict[str, list[int]] = {}
    for position, value in enumerate(section.outputs[count:]):
        assert value is not None
        made_by.setdefault(value.node, []).append(position)

    def send(name: str) -> None:
        for position in made_by.get(name, ()):
            value = section.outputs[count + position]
            assert value is not None
            send_gradient(job, buckets, position, gradients[position], value)

    for name in section.inputs:
        send(name)
    for instruction in section.instructions:
        emitter.instructions.append(instruction)
        send(instruction.name)
    early = {instruction.name for instruction in emitter.instructions}
    done = buckets.finish()
    outputs = (*section.outputs[:count], *(done[position] for position in range(len(gradients))))
    return split_after(emitter.section("last", section.inputs, outputs), count, early, "last", "reduce")
