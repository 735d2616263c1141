"""FP8 products of few rows, each of which rounds the rows that it reads."""
