"""Attention whose bits do not depend on the batch."""
