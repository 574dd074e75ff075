"""LoRA training of a pruned model, one decoder layer at a time: fields, adapters, the training loop.

Shapes: S tokens of a sequence, V vocabulary.
"""
