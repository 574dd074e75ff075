"""Removable structure of a model class, measured on a tiny random instance."""
