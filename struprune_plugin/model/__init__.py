"""What is cut: a model's structure, kinds of units, the layers they are in, and the surgery."""
