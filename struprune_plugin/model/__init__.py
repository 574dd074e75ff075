"""Structure of a model, its kinds of units and layers, and the surgery on them."""
