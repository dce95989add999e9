"""The page at `/`, which shows what the cluster does. Read `endpoints.py` first."""
