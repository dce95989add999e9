"""What the scripted workers say of themselves when they register."""

from __future__ import annotations

import uuid

from kv_transfer.layout import KvLayout
from splitserve.v1 import kv_transfer_pb2, registry_pb2

BLOCKS = 1 << 20
BLOCK_TOKENS = 16
STEP_TOKENS = 8192
RUNNING = 65536
CONTEXT_TOKENS = 8192
FINGERPRINT = "ab" * 32


def registration(
    worker_id: str,
    pool: registry_pb2.Pool.ValueType,
    address: str,
    epoch: int,
    tokenizer: str,
    vocabulary: int,
) -> registry_pb2.RegisterRequest:
    """A worker with more room than any load here needs. `tokenizer` is also the model's name."""
    layout = KvLayout(FINGERPRINT, "uint8", BLOCK_TOKENS, 1, 1, 8)
    return registry_pb2.RegisterRequest(
        worker_id=worker_id,
        epoch=epoch,
        pool=pool,
        address=address,
        model=registry_pb2.ServedModel(
            name=tokenizer,
            tokenizer_source=tokenizer,
            context_tokens=CONTEXT_TOKENS,
            vocabulary_size=vocabulary,
        ),
        endpoint=kv_transfer_pb2.TransferEndpoint(
            agent_id=str(uuid.uuid4()),
            transport="memory",
            metadata=b"scripted",
            base_address=4096,
            block_bytes=layout.block_bytes,
            num_blocks=BLOCKS,
            memory_kind="DRAM",
            layout=layout.to_proto(),
        ),
        max_step_tokens=STEP_TOKENS,
        max_running_requests=RUNNING,
    )
