"""`splitserve record` and `splitserve advise`. Read `record.py` first."""
