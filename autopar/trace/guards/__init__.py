"""What a trace takes for granted of Python objects, and what changed."""
