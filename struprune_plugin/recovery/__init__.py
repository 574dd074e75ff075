"""Recovery training of a pruned model: samples, the teacher's targets, adapters, and optimizer steps.

Shapes: B batch, S sequence, V vocabulary, k teacher outcomes kept a token.
"""
