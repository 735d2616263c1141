"""The control plane: requests, blocks and the schedule, in plain Python and numpy. It never imports jax."""
