"""``autopar.verify``: a plan executed and compared with one process."""
