"""The recurrence of a Mamba-2 layer, over a batch of sequences whose states live in slots."""
