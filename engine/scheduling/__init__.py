"""The scheduler's inputs: the order of waiting requests, and the duration of steps. Read `waiting_queue.py` first."""
