"""Copies, gathers and scatters whole blocks of every layer's pool."""
