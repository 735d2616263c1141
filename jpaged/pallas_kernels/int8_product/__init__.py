"""Products with weights in 8-bit integers."""
