"""The decode worker: reserves blocks, admits pushed KV, streams tokens. Read `kv_consumer.py` first."""
