"""The books of the KV pool: which blocks are free, shared, cached by prefix, or in host memory."""
