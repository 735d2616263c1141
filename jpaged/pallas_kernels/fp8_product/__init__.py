"""Products with FP8 weights."""
