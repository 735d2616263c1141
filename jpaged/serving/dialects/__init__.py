"""Other APIs than OpenAI's chats and completions: thin translations onto the same request and the same outputs."""
