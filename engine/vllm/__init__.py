"""vLLM as an engine behind splitserve's handoff. Read `vllm_engine.py` first."""
