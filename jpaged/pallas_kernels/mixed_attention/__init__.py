"""Attention of a step that decodes some sequences and computes prompts of others."""
