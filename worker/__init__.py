"""The worker process and the thread that runs its engine. Read `process.py` first, then `engine_thread.py`."""
