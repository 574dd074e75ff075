"""A guest: the paper's own methods, registered as any third party's would be. Only ``registration`` imports it."""

from struprune_plugin.paper import admm_methods, gates, snip, softmax_rules, threshold_rule  # noqa: F401
