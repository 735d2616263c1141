"""Regular constraints: what texts they allow, as finite automata."""
