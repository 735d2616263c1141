"""A causal convolution of a few taps, over a batch of sequences whose last inputs live in slots."""
