"""The front door: checks requests, runs them through the engine and makes outputs of their tokens."""
