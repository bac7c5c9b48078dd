"""What trainers of published rows do in a step in addition to training, which no layout holds.

Composer, which llm-foundry trains with, evaluates training metrics on the logits of every microbatch after its backward
(github.com/mosaicml/composer, `trainer.py`, `_train_microbatch`); of llm-foundry's models these are by default
`LanguageCrossEntropy` and `LanguagePerplexity` (`use_train_metrics`). Each is torch's own cross entropy under autocast:
logits are copied to fp32, and a table of their log-probabilities is written, without gradients. By then backward has
freed what layers kept, so that the two tables do not add to the peak of memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autopar.cluster.description import Cluster

from .published_systems import system

WITH_METRICS = r"llm-foundry"
METRICS = 2
# Of a logit: read in two bytes, written and read in fp32, its log-probability written in fp32.
BYTES = 2 + 4 + 4 + 4


def beside_seconds(row: Mapping[str, Any], cluster: Cluster, logits: float) -> float:
    """Seconds of a step spent beside training, by memory bandwidth; ``logits`` is how many a device computes a step."""
    if not re.search(WITH_METRICS, system(row)):
        return 0.0
    return METRICS * BYTES * logits / cluster.device.memory_bandwidth
