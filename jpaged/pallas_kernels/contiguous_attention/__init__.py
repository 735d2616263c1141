"""The op `contiguous_attention`: see `api.py`."""
