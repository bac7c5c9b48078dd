"""What the axes of a mesh are for under a layout, and what that leaves of a placement program."""
