"""Where tiers keep the bytes of blocks: a worker's own slots, and shared stores. Read `block_store.py` first."""
