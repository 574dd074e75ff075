"""LoRA training of a pruned model."""
