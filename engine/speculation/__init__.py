"""Speculative decoding: drafts of next tokens, and how many of them a step checks. Read `speculator.py` first."""
