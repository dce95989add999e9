"""The OpenAI-compatible API. Read `app.py` first: the paths and their handlers."""
