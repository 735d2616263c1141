"""Attention over latents of a step with prompts, whose own tokens have keys and values of each head."""
