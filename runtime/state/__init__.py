"""Parameters, gradients and optimizer state of a parallel module."""
