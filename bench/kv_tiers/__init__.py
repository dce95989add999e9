"""What tiers below the KV blocks are worth: `python -m bench.kv_tiers`."""
