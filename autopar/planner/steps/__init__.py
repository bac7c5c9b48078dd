"""The program of a placed step, and the memory that it holds, measured by rehearsing it."""
