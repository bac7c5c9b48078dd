"""What is asked of one mesh, and its answer: formulates the placement program, solves it, writes the plan."""
