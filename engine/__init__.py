"""The engine that both workers run: model, paged KV cache, scheduler, sampler. Read `core/engine_core.py` first."""
