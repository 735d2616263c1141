"""Weights from disk to devices: safetensors and Orbax checkpoints, read in pieces."""
