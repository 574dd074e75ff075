"""Model card, tables, HTML report and pictures, from the manifest."""
