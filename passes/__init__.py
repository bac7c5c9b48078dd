"""Passes: graph to graph. Each file defines one; ``base`` says what a pass is, ``rules`` and ``rules_*`` how operations
can be sharded."""
