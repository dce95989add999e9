"""Where tiers keep the bytes of blocks: a worker's own slots, and stores that it shares. Read `block_store.py` first."""
