"""Passes: graph to graph. ``base`` says what a pass is; each is a file of the packages below."""
