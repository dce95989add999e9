"""Workers that fail. Read `circuit_breakers.py` first."""
