"""What is cut: model families, kinds of units, the layers they are in, and the surgery."""
