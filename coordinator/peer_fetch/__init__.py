"""Prefixes from one worker's cache to another's. Read `policy.py` first."""
