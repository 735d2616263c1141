"""New keys and values into their slots of the pool."""
