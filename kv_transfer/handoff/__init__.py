"""The handoff of one prompt. Read `messages.py` first, then `pusher.py` and `reservation_table.py`: its two sides."""
