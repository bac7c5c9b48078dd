"""``autopar.verify``: executes a plan and compares it with one process."""
