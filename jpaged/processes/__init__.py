"""Engines in processes of their own: replicas, the router, and the messages that they exchange."""
