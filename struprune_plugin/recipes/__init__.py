"""Recipes: found, read, changed, outlined."""
