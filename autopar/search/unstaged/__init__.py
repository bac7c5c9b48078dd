"""Plans without stages, of the whole batch at once."""
