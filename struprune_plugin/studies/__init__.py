"""Studies of pruning runs: plan, scores, sweep."""
