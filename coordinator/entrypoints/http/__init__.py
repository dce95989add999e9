"""The HTTP server under the OpenAI API. Read `exchange.py` first: one request and its response."""
