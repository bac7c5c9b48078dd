"""From a chosen placement to a program of sections and collectives."""
