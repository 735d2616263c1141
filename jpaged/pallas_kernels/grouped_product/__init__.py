"""Products of groups of rows, each with the matrix of its group: the MLPs of a mixture of experts."""
