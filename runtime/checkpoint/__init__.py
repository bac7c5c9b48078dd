"""Checkpoints: saves the state of a training under one plan, and loads it under any other."""
