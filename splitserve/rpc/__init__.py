"""gRPC plumbing of all components. Read `server.py` first; `status.py` maps errors."""
