"""A model's structure, its kinds of units and layers, and the surgery on them."""
