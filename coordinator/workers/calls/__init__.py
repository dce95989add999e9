"""Calls to one worker. Read `worker_calls.py` first; `splitserve.rpc.call_stream` carries them."""
