"""The neutral worker: both services and one engine, and a leaning that changes live. Read `service.py` first."""
