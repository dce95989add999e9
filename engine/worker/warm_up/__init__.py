"""What a worker does before its first request, and while there is none. Read `idle_work.py` first."""
