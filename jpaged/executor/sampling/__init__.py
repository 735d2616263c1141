"""Sampling on the device: the sampler, its per-slot state, and log-probabilities."""
