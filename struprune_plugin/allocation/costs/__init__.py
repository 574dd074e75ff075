"""Costs of modules in an engine by number of kept units: measured, stored in a file, interpolated."""
