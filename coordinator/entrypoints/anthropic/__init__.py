"""Anthropic's Messages API over chat requests. Read `endpoints.py` first."""
