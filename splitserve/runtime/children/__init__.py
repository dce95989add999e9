"""Processes that this one starts: how they begin, and how they end with it. Read `ending.py` first."""
