"""Methods of the paper, registered as a third party's would be. Only ``registration`` imports this package."""

from struprune_plugin.paper import admm, gates, paper_rules, snip  # noqa: F401
