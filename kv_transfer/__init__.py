"""Moves KV blocks between workers' memories. Read `handoff/ticket.py` first, then `handoff/pusher.py`."""
