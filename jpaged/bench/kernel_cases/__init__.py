"""The cases of `jpaged bench kernels`, a file for each kind."""
