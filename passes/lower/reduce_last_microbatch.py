"""Reduces the gradients of a chunk in its last microbatch, each as soon as it is computed.

Waiting for the buckets that are in flight after the last gradient is a separate section, since a rank of a pipeline may
have other work meanwhile. If it has, or if another stage waits for one of its gradients, this microbatch does not wait
for buckets: it starts as many as may be in flight at once, and the others start later.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.node import Output
from autopar.ir.program import Section

from .emit import Buckets, Emitter
from .lower import Lowering, send_gradient
from .split_section import split_after


def reducing(job: Lowering, section: Section, gradients: Sequence[Output], waits: bool) -> tuple[Section, Section]:
    """Splits ``section``, whose last outputs are the unreduced ``gradients``, in two. The first starts buckets as they
    fill, and ends with the last gradient. The second, called ``reduce``, takes the values that the first returns after
    its other outputs, and returns gradients as they are stored. ``waits``: whether the first may wait for a bucket to
    start another."""
    count = len(section.outputs) - len(gradients)
    emitter = Emitter(job.mesh, job.coordinate)
    emitter.taken.update(section.inputs, (instruction.name for instruction in section.instructions))
    buckets = Buckets(emitter, job.bucket_bytes, "gradients", waits)
    produced_by: dict[str, list[int]] = {}
    for position, value in enumerate(section.outputs[count:]):
        assert value is not None
        produced_by.setdefault(value.node, []).append(position)

    def send(name: str) -> None:
        for position in produced_by.get(name, ()):
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
