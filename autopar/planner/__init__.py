"""Plans for one mesh: formulates the placement program, solves it, writes the plan."""
