"""Layouts chosen by hand (:class:`autopar.Layout`): their prices, and a search among them."""
