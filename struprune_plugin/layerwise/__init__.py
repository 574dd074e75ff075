"""One decoder layer at a time: capture inputs, run, accumulate statistics."""
