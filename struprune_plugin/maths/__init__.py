"""Tensors in, tensors out: no modules, no logging, no files."""
