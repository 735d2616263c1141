"""The KV pool on the device: its layout, cache groups, and copies to and from host memory."""
