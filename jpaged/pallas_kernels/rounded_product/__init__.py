"""Products of rows that are rounded to FP8, with weights in FP8."""
