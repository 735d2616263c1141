"""This machine and process: cores, devices, interrupts, garbage collection, and where models lie on disk."""
