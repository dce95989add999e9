"""Workers that fail. Read `breaker_registry.py` first."""
