"""Model card, tables, HTML report and plots, from the manifest."""
