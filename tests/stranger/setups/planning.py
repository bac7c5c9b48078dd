"""A model and a batch, and nothing distributed. verify starts processes, which import this file."""

from model import make

import autopar  # noqa: F401

model, batch = make(layers=1)
