"""What the scheduler decides by: the order of waiting requests, how long steps take. Read `waiting_queue.py` first."""
