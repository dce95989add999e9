"""The handoff of one prompt. Read `ticket.py` first, then `pusher.py` (prefill) and `reservation_table.py` (decode)."""
