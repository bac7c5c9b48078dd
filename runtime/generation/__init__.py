"""Generation of text by an inference module: key-value caches that rest on the devices, and ``generate``."""
