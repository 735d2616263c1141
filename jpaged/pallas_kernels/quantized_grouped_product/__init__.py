"""Products of groups of rows, each with the matrix of its group, in 8 or 4 bits."""
