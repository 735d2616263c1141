"""Rows rounded to FP8, together with what makes them."""
