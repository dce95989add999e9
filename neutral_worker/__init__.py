"""Both services and one engine: neutral workers, whose leaning changes live, and pinned ones that trade prefixes.

Read `service.py` first.
"""
