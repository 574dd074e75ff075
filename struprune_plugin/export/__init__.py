"""From a model sliced in memory to a checkpoint that loads: per-layer config, modelling code, other forms."""
