"""Benchmarks, run as `jpaged bench`; only the command line imports them."""
