"""Studies of pruning runs: plan, probe, sweep."""
