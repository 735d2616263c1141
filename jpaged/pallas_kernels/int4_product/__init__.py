"""Products with 4-bit weights."""
