"""How blocking and shared calls are made beside an event loop. Read `call_thread.py` first."""
