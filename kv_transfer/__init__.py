"""Moves KV blocks between workers' memories. Read `handoff/messages.py` first, then `handoff/pusher.py`."""
