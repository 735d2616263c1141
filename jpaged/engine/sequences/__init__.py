"""Requests and their sequences: state, groups, slots and beam search."""
