"""Smaller vocabularies: the tokenizer and the tensors with a row per token, of which some go."""
