"""The prefill worker: computes prompts, returns first tokens, pushes KV. Read `kv_producer.py` first."""
