"""The price of one section of a layout: its placement, kernels, communication and memory. A new term goes here."""
