"""A block that is a whole program."""
