"""The `nixl` transport. Read `transport.py` first."""
