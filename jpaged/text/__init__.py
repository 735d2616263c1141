"""Text to token ids and back: tokenizers, the detokenizer, chat templates."""
