"""Tensors in, tensors out: statistics, importance, elimination, solves, rotations, budgets."""
