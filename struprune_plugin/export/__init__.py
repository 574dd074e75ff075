"""Export of a model sliced in memory to a loadable checkpoint: per-layer config, modelling code, other forms."""
