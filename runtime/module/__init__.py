"""The parallel module: what a user holds instead of the model."""
