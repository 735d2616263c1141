"""The draw of tokens from logits."""
