"""The op `invariant_product`: see `api.py`."""
