"""Numerical routines on tensors: statistics, importance, elimination, solves, rotations, budgets."""
