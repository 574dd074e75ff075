"""Model card, tables and HTML report, from the manifest."""
