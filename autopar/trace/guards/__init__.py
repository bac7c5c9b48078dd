"""What a trace assumes about Python objects, and which of them have changed."""
