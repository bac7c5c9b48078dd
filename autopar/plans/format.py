"""The fields of a plan's file, and the versions of its form.

Versions are raised by hand when a reader of the old form would misread the new one. Plans of one version are written in
two ways: as they are, and, in JSON, with the tables folded that grow with depth (:mod:`.folded_tables`), which has a
number of its own.
"""

from __future__ import annotations

# Of plans as they are, and with folded tables. Raised when every field had a digest; the latter when actions of
# pipelines were folded as well.
VERSION, FOLDED = 10, 12
# Version 7 had another name for the operation that saves an activation; 7 to 9 may have no digests.
READABLE = (7, 8, VERSION)
# What a folded version is when it is unfolded.
UNFOLDED = {9: 8, 11: VERSION, FOLDED: VERSION}
# The first version of which every field has a digest, that is not a choice.
SIGNED = 10
STRINGS = ("model", "cluster", "cluster_source", "graph_hash", "precision")
NUMBERS = ("objective", "bound", "gap", "solve_seconds")
COUNTS = ("batch", "memory_limit", "stages", "microbatches")
NAMES = ("pinned", "module_nodes", "gradient_values", "rules")
LISTS = ("axis_names", "fallbacks", "warnings", "recomputed")
OTHERS = ("mesh", "status", "timings", "schedule")
PLAIN = (*STRINGS, *COUNTS, *NUMBERS, *LISTS, *OTHERS, *NAMES)
TABLES = ("predicted", "baselines", "parameters", "outputs", "strategy_table", "strategies", "nodes", "alternatives")
REQUIRED = (*PLAIN, *TABLES, "holdings", "lines", "pipeline")
DEVICES = ("device_peaks", "device_limits")
# Written where there is something.
OPTIONAL = ("layout", "tied", "offloaded", "excluded", *DEVICES)
RECORDS = ("sync", "searched")
