"""Queries, keys and values from a projection's output, and a written pool."""
