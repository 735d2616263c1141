"""Rows whose next step waits for a decision on the host, such as beams."""
