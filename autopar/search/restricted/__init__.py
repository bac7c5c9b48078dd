"""A layout as a restriction of the search: the meshes that it allows, what they must divide, and what would fit."""
