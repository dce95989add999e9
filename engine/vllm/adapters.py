"""The adapters that vLLM holds: loaded by the first request that names them, and unloaded when others need the room.

vLLM would load an adapter in the middle of a step, where a failure ends the engine. So it is loaded before its request
is given to vLLM, and is never unloaded while any request needs it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from vllm.config.lora import LoRAConfig
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from engine.model.adapter import AdapterFiles, bad_adapter, read_adapter
from splitserve.errors import FailedPreconditionError
from splitserve.logs import log_event


class LoadedAdapters:
    """As many at once as vLLM's options allow; of those that no request needs, the one used least recently gives way.

    `engine` is a `vllm.v1.engine.llm_engine.LLMEngine`.
    """

    def __init__(self, files: Mapping[str, AdapterFiles], engine: Any) -> None:
        self._files, self._engine = files, engine
        lora = engine.vllm_config.lora_config
        on_cpu = engine.vllm_config.device_config.device_type == "cpu"
        self._most = lora.max_loras - 1 if on_cpu else lora.max_cpu_loras  # see `keep_slot_empty`
        self._numbers = {name: number for number, name in enumerate(sorted(files), start=1)}
        self._uses: dict[str, int] = {}
        """Requests by adapter, for loaded ones; the least recently used first."""

    def acquire(self, name: str) -> LoRARequest | None:
        """What vLLM is to be given with a request for this adapter; None while others take all the room.

        Each one that is acquired is released once. Raises FailedPreconditionError (ADAPTER_FAILED) if it cannot be
        loaded.
        """
        if name not in self._uses:
            if len(self._uses) >= self._most and not self._unload_one():
                return None
            self._load(name)
        self._uses[name] = self._uses.pop(name, 0) + 1
        return self._request(name)

    def release(self, name: str) -> None:
        """A request does not need its adapter any more."""
        self._uses[name] -= 1

    def _unload_one(self) -> bool:
        idle = next((name for name, uses in self._uses.items() if not uses), None)
        if idle is None:
            return False
        del self._uses[idle]
        self._engine.remove_lora(self._numbers[idle])
        log_event("adapter.unloaded", adapter=idle)
        return True

    def _load(self, name: str) -> None:
        began_s, files = time.monotonic(), self._files[name]
        try:
            if read_adapter(name, files.folder).adapter != files.adapter:
                raise bad_adapter(name, "its files have changed since the worker started")
            self._engine.add_lora(self._request(name))
        except Exception as error:
            with suppress(Exception):  # vLLM may have kept it without all of its weights
                self._engine.remove_lora(self._numbers[name])
            log_event("adapter.failed", adapter=name, error=f"{type(error).__name__}: {error}")
            message = f"adapter {name!r} could not be loaded on this worker"
            raise FailedPreconditionError(message, reason="ADAPTER_FAILED", field="adapter") from error
        log_event("adapter.loaded", adapter=name, seconds=round(time.monotonic() - began_s, 3))

    def _request(self, name: str) -> LoRARequest:
        return LoRARequest(name, self._numbers[name], str(self._files[name].folder))


def keep_slot_empty(args: Any) -> None:
    """Gives vLLM's `EngineArgs` one slot for adapters more than are ever loaded.

    vLLM's kernels on cpu add the last slot's weights to rows without an adapter, where others of the step have one.
    Slots are filled from the first one on, so the last stays zero.
    """
    args.max_loras += 1
    args.max_cpu_loras = args.max_loras  # on cpu the slots are main memory already


def check_supported(files: Sequence[AdapterFiles], max_rank: int) -> None:
    """Checks that adapters have at most this rank, and are of a kind of LoRA that vLLM computes.

    Raises ConfigError (field `engine.adapters.NAME`).
    """
    for adapter_files in files:
        name, rank = adapter_files.adapter.name, adapter_files.rank
        if rank > max_rank:
            raise bad_adapter(name, f"its rank is {rank}; engine_args allow {max_rank} (--max-lora-rank)")
        try:
            PEFTHelper.from_local_dir(str(adapter_files.folder), None).validate_legal(
                LoRAConfig(max_lora_rank=max_rank)
            )
        except (TypeError, ValueError) as error:
            raise bad_adapter(name, f"vLLM refuses it: {error}") from None
