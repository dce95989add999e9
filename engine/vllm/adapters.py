"""The LoRA adapters that vLLM holds. The first request for an adapter loads it; it is unloaded when others need room.

vLLM itself would load an adapter in the middle of a step, where a failure ends the engine. So the worker has vLLM load
the adapter before it gives vLLM the request, and unload it only while no request needs it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from vllm.config.lora import LoRAConfig
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from engine.model.adapter import AdapterFiles, bad_adapter, read_adapter
from splitserve.errors import FailedPreconditionError
from splitserve.logs import log_event


class LoadedAdapters:
    """Loads and unloads adapters. Among those that no request needs, the least recently used one is unloaded first.

    `engine` is a `vllm.v1.engine.llm_engine.LLMEngine`. Its options bound how many adapters are loaded at once.
    """

    def __init__(self, files: Mapping[str, AdapterFiles], engine: Any) -> None:
        self._files, self._engine = files, engine
        lora = engine.vllm_config.lora_config
        on_cpu = engine.vllm_config.device_config.device_type == "cpu"
        self._max_loaded = lora.max_loras - 1 if on_cpu else lora.max_cpu_loras  # see `keep_slot_empty`
        self._ids = {name: lora_id for lora_id, name in enumerate(sorted(files), start=1)}
        self._uses: dict[str, int] = {}
        """How many requests need each loaded adapter; the least recently used adapter first."""

    def acquire(self, name: str) -> LoRARequest | None:
        """Loads an adapter for a request, and returns what vLLM takes with the request; None if there is no room now.

        Call `release` once for each result. Raises FailedPreconditionError (ADAPTER_FAILED) if it cannot be loaded.
        """
        if name not in self._uses:
            if len(self._uses) >= self._max_loaded:
                idle = next((loaded for loaded, uses in self._uses.items() if not uses), None)
                if idle is None:
                    return None
                del self._uses[idle]
                self._engine.remove_lora(self._ids[idle])
                log_event("adapter.unloaded", adapter=idle)
            self._load(name)
        self._uses[name] = self._uses.pop(name, 0) + 1
        return self._request(name)

    def release(self, name: str) -> None:
        """Says that a request no longer needs its adapter."""
        self._uses[name] -= 1

    def _load(self, name: str) -> None:
        began_s, files = time.monotonic(), self._files[name]
        try:
            if read_adapter(name, files.folder).adapter != files.adapter:
                raise bad_adapter(name, "its files have changed since the worker started")
            self._engine.add_lora(self._request(name))
        except Exception as error:
            with suppress(Exception):  # vLLM may have kept a part of it
                self._engine.remove_lora(self._ids[name])
            log_event("adapter.failed", adapter=name, error=f"{type(error).__name__}: {error}")
            message = f"adapter {name!r} could not be loaded on this worker"
            raise FailedPreconditionError(message, reason="ADAPTER_FAILED", field="adapter") from error
        log_event("adapter.loaded", adapter=name, seconds=round(time.monotonic() - began_s, 3))

    def _request(self, name: str) -> LoRARequest:
        return LoRARequest(name, self._ids[name], str(self._files[name].folder))


def keep_slot_empty(args: Any) -> None:
    """Gives vLLM's `EngineArgs` one more adapter slot than adapters are ever loaded. It is for CPU.

    In a step with adapters, vLLM's kernels on CPU add the last slot's weights to the rows without an adapter. vLLM
    fills slots from the first one on, so the last slot stays zero.
    """
    args.max_loras += 1
    args.max_cpu_loras = args.max_loras  # on CPU the slots are in main memory already


def check_supported(files: AdapterFiles, max_rank: int) -> None:
    """Checks that vLLM can compute an adapter. Raises ConfigError (field `engine.adapters.NAME`)."""
    try:
        helper = PEFTHelper.from_local_dir(str(files.folder), None)
        helper.validate_legal(LoRAConfig(max_lora_rank=max_rank))
    except (TypeError, ValueError) as error:
        raise bad_adapter(files.adapter.name, f"vLLM refuses it: {error}") from None
