"""The op `invariant_attention`: see `api.py`."""
