"""Sums over devices, added to the residual stream and normed."""
