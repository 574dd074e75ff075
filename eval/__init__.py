"""Benchmarks and tools around StruPrune; nothing in the package imports them."""
