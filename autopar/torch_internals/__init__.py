"""The private and undocumented parts of torch, and of transformers, that anything but the runtime relies on.

This package and :mod:`autopar.runtime.torch_internals` are the only places that use a name of another library that
begins with an underscore, or that its documentation leaves out (``tests/house/test_private_parts.py``). Each function
says what it relies on, and in brackets which version of torch has it: ``(2.11)`` is the oldest that is supported, and
says nothing about earlier ones. Where supported versions differ, the difference is handled here, and callers do not see
it.
"""
