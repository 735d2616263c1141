"""The first half of a gated MLP."""
