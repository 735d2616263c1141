"""A model's turn: reasoning, text and tool calls. `formats.py` declares how each family of models writes them."""
