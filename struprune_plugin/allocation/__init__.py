"""Allocation of a budget: how many units each module keeps."""
