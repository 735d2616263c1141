"""Attention of one query token a sequence over paged keys and values."""
