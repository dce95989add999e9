"""Commands that query a running coordinator. Read `generate.py` first."""
