"""Evaluation and its data: token windows from text, calibration data, perplexity and lm-eval tasks."""
