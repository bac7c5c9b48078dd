"""The private and undocumented parts of torch that the runtime stands on; see :mod:`autopar.torch_internals`."""
