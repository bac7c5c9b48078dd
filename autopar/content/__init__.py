"""Hashes of objects, code and files, and the folder in which results are cached under them."""
