"""The queue of requests that wait for capacity. Read `controller.py` first: the asynchronous edge; the rest is pure."""
