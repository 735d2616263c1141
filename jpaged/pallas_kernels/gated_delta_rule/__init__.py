"""The recurrence of a gated delta net, over a batch of sequences whose states live in slots."""
