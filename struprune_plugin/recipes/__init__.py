"""Recipes: lookup, reading and changes."""
