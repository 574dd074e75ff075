"""Train what is left of a pruned model: samples, a teacher's targets, adapters and the steps that move them.

Shapes: B batch, S sequence, V vocabulary, k teacher outcomes kept a token.
"""
