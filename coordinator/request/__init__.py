"""The values of one request. Read `state.py` first: its state while it runs."""
