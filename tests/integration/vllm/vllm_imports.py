"""What workers of engine `vllm` import, for processes that are forked with it."""

from __future__ import annotations

from importlib import import_module

from engine.vllm.boot import prepare_environment

NAMES = ("adapters", "options", "prefix_events", "vllm_engine")

prepare_environment(1)  # vLLM reads some of it when it is loaded
for name in (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "engine.model.loaded_model",
    *(f"engine.vllm.{name}" for name in NAMES),
):
    import_module(name)
