"""Settings objects of methods and kinds of units, and their registries."""
