"""Rows whose next step waits for a decision on the host, such as beams, and tables for the device to decide by."""
