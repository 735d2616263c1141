"""The OpenAI-compatible server: an API process (asyncio, HTTP) and an engine process, joined by a socket."""
