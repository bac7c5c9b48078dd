"""What other systems do in a training step that the runtime does not, priced as layouts are.

A :class:`Recipe` is a layout with more fields. Wherever layouts are priced, recipes can be: each part of a price that
they change is a subclass of the product's (:class:`RecipePricing`), and registered where this package is imported.
"""

from .pricing import RecipePricing
from .recipe import Recipe

__all__ = ["Recipe", "RecipePricing"]
