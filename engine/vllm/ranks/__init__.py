"""vLLM with tensor parallelism: ranks are child processes that hold KV. Read `rank_group.py` first."""
