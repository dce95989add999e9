"""The `ucx` transport. Read `transport.py` first."""
