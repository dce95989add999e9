"""A whole cluster on one host, as `splitserve up` starts it. Read `supervisor.py` first."""
