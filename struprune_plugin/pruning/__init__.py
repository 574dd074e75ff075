"""Prune a decoder layer, and all of them in turn."""
