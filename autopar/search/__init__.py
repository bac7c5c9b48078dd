"""The outer search: stages, microbatches, cuts, chunks and schedules around the planner."""
