"""OpenAI's Responses API over chat requests. Read `endpoints.py` first."""
