"""The data plane: device state, the KV pool, step programs and the runner that dispatches them."""
