"""Registrations of workers that need not exist."""

from __future__ import annotations

import uuid
from typing import Any

from kv_transfer.layout import KvLayout
from splitserve.v1 import kv_transfer_pb2, registry_pb2
from tests.support.engine.word_tokenizer import VOCABULARY_SIZE

BLOCK_SIZE = 16


def layout(**changed: Any) -> kv_transfer_pb2.KvLayout:
    fields = {
        "model_fingerprint": "ab" * 32,
        "dtype": "float32",
        "block_size_tokens": BLOCK_SIZE,
        "axis_order": "layer,kv,head,token,dim",
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 8,
        "engine_version": "1",
    }
    return kv_transfer_pb2.KvLayout(**(fields | changed))


def registration(
    worker_id: str,
    pool: registry_pb2.Pool.ValueType,
    address: str = "127.0.0.1:1",
    *,
    epoch: int = 1,
    model: str = "words",
    tokenizer_source: str = "words",
    context_tokens: int = 64,
    vocabulary_size: int = VOCABULARY_SIZE,
    transport: str = "nixl",
    **layout_changes: Any,
) -> registry_pb2.RegisterRequest:
    shape = layout(**layout_changes)
    return registry_pb2.RegisterRequest(
        worker_id=worker_id,
        epoch=epoch,
        role=pool,
        address=address,
        model=registry_pb2.ServedModel(
            name=model,
            tokenizer_source=tokenizer_source,
            context_tokens=context_tokens,
            vocabulary_size=vocabulary_size,
        ),
        endpoint=kv_transfer_pb2.TransferEndpoint(
            agent_id=str(uuid.uuid4()),
            transport=transport,
            metadata=b"m",
            base_address=4096,
            block_bytes=KvLayout.from_proto(shape).block_bytes,
            num_blocks=128,
            memory_kind="DRAM",
            layout=shape,
        ),
        max_step_tokens=2048,
        max_running_requests=64,
    )
