"""Pruning of one decoder layer, and of all layers in turn."""
