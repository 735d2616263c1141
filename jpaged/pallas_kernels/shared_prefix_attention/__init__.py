"""Decode attention of sequences that begin alike, and the merge of partial attention."""
