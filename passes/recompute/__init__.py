"""Which activations are saved for backward, and which are computed again."""
