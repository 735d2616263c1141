"""The version, alone in a file so that builds can read it without importing jax."""

__version__ = "0.1.0"
