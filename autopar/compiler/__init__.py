"""From a plan to compiled calls: what a parallel module runs for each kind of call."""
