"""Text to token windows; perplexity and lm-eval."""
