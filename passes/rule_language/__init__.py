"""The language in which rules are written: claims, dimension strings, composition over axes."""
