"""Methods of the paper, registered as a third party's would be. Only ``registration`` imports this package."""

from struprune_plugin.paper import admm, gates, snip, softmax_rules, threshold_rule  # noqa: F401
