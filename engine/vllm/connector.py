"""The KV connector that vLLM loads: names what a peer writes and keeps blocks until writers are done.

It moves no bytes. Any exception here ends vLLM's engine, and so does reporting a request twice.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from engine.core.types import ReservedBlocks
from engine.vllm.bridge import ROW_FIELD, VllmRow, the_bridge


class SplitserveConnector(KVConnectorBase_V1, SupportsHMA):
    """Scheduler and worker side in one class; with tensor parallel size 1 both live on the engine thread."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._bridge = the_bridge()
        self._block_size = vllm_config.cache_config.block_size
        self._keys: dict[str, str] = {}

    # Scheduler side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All tokens of a reserved request come from a peer. A second question, after a preemption, gets 0: the KV is
        then computed here, and a load that nobody makes would never end."""
        row = self._row(request)
        if not row.awaits_kv:
            return 0, False
        return request.num_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Notes the blocks that a peer is to write."""
        row = self._row(request)
        if not row.awaits_kv or not num_external_tokens:
            return
        cached = request.num_tokens - num_external_tokens
        table = blocks.get_block_ids()[0]
        row.reserved = ReservedBlocks(tuple(table[cached // self._block_size :]), cached)
        row.awaits_kv = False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Notes what the step that begins computes."""
        bridge, scheduled = self._bridge, scheduler_output.num_scheduled_tokens
        bridge.scheduled = []
        for new in scheduler_output.scheduled_new_reqs:
            key = new.sampling_params.extra_args[ROW_FIELD]
            self._keys[new.req_id] = key
            bridge.schedule(key, new.num_computed_tokens, scheduled[new.req_id])
        running = scheduler_output.scheduled_cached_reqs
        for request_id, computed in zip(running.req_ids, running.num_computed_tokens, strict=True):
            bridge.schedule(self._keys[request_id], computed, scheduled[request_id])
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Holds the blocks of a prompt that was computed for a peer, until they were sent."""
        row = self._row(request)
        self._keys.pop(request.request_id, None)
        row.held = row.sequence.request.prefill_only and bool(block_ids[0])
        return row.held, None

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Notes where the KV lies."""
        self._bridge.kv_caches = kv_caches

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose blocks were sent, and those whose KV has come or will not come any more."""
        sent, received = self._bridge.take_reports()
        return sent or None, received or None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to do: peers write."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: what is scheduled is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: KV is sent between the steps."""

    def wait_for_save(self) -> None:
        """Nothing to do: KV is sent between the steps."""

    def _row(self, request: Any) -> VllmRow:
        return self._bridge.rows[request.kv_transfer_params[ROW_FIELD]]
