"""Runs about runs: plan, probe, sweep."""
