"""What the coordinator measures. Read `stats.py` first: the request statistics; `recorder.py` fills them in."""
