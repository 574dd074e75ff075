"""Layer-by-layer passes: capture of inputs, runs, accumulation of statistics."""
