"""KV blocks: their owners, the prefix cache and their memory. Read `block_pool.py` first."""
