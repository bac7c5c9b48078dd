"""The private and undocumented parts of torch that the runtime relies on; see :mod:`autopar.torch_internals`."""
