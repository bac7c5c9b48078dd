"""Rules found by experiment, for operations without written ones."""
