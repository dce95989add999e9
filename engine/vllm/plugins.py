"""What vLLM calls in this process: the KV connector, the logits processor, the publisher of prefix-cache events.

The connector moves no bytes: it names what a peer writes, and keeps blocks until writers are done. Any exception here
ends vLLM's engine, and so does reporting a request twice. vLLM's own sampling parameters stay greedy.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventPublisher
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from engine.core.engine import ReservedBlocks
from engine.kv_cache.block_pool import KvEventLog
from engine.vllm.bridge import ROW_FIELD, VllmRow, the_bridge
from engine.vllm.token_chooser import TokenChooser
from splitserve.generation.kv_blocks import block_hash


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


class SamplingProcessor(LogitsProcessor):
    """Chooses one token a row: a known one, such as the first one of a handoff, or a sampled one."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, VllmRow] = {}
        self._chooser = TokenChooser()

    def is_argmax_invariant(self) -> bool:
        """No: it chooses the token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the rows of vLLM's batch."""
        process_dict_updates(self._rows, batch_update, self._row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Raises the chosen token of each row above all others. `logits`: float32 `[rows, vocabulary]`.

        Rows of unfinished prompts stay as they are: vLLM drops their tokens.
        """
        for index, token in self._chooser.choose(logits, self._rows).items():
            logits[index, token] = float("inf")
        return logits

    @staticmethod
    def _row(params: Any, prompt_token_ids: list[int] | None, output_token_ids: list[int]) -> VllmRow | None:
        # vLLM's warm-up runs have no request behind them.
        key = row_key(params)
        return None if key is None else the_bridge().rows[key]


def row_key(params: Any) -> str | None:
    """The key of the request with these parameters of vLLM's; None for one of vLLM's own."""
    return (params.extra_args or {}).get(ROW_FIELD)


class PrefixEvents(EventPublisher):
    """Takes vLLM's events within the process; vLLM's scheduler calls it at the end of a step.

    vLLM's own hashes are replaced by splitserve's, which follow from the block's tokens and the hash of its parent.
    """

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self._names: dict[Any, bytes] = {}

    def publish(self, events: Any) -> None:
        """Translates a batch of events."""
        for event in events.events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved():
                    for known in event.block_hashes:
                        if (name := self._names.pop(known, None)) is not None:
                            self._log.removed(name)
                case AllBlocksCleared():
                    for name in self._names.values():
                        self._log.removed(name)
                    self._names.clear()

    def shutdown(self) -> None:
        """Nothing to release."""

    def _stored(self, event: Any) -> None:
        parent = None if event.parent_block_hash is None else self._names.get(event.parent_block_hash)
        if parent is None and event.parent_block_hash is not None:
            return  # a child of a block that was removed meanwhile cannot be found any more
        for index, known in enumerate(event.block_hashes):
            tokens = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
            salt = _salt(event.extra_keys[index]) if parent is None and event.extra_keys else ()
            parent = block_hash(parent, tokens, salt)
            self._names[known] = parent
            self._log.stored(parent)


def salt_text(salt: bytes) -> str | None:
    """A cache salt as vLLM takes it; None without one."""
    return salt.hex() or None


def _salt(extra_keys: Any) -> tuple[bytes, ...]:
    """The salt of a first block, from the keys that vLLM hashed with it: an adapter's name, then the salt.

    A request with an adapter always has a salt.
    """
    return tuple(bytes.fromhex(key) for key in (extra_keys or ())[-1:])
