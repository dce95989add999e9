"""KV blocks of prefixes below the pool: in host memory and on a local disk. Read `kv_tiers.py` first."""
