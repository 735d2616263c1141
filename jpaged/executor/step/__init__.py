"""Step programs, the state that they keep on the device, and the runner that dispatches them."""
