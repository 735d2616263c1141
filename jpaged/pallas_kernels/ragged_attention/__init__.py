"""Attention of any mix of prefill chunks and decode rows over paged keys and values."""
