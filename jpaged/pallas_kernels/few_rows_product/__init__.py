"""The product of few rows with a matrix, with the norm before it and the sum behind it in the same kernel."""
