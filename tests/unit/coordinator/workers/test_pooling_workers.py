"""Workers of pooling models: without KV they are ready alone, and have nothing to do with each other."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from coordinator.workers.registry import Registry
from splitserve.errors import FailedPreconditionError, InvalidArgumentError
from splitserve.v1 import generation_pb2, kv_transfer_pb2, registry_pb2
from tests.support.cluster.registrations import layout, registration

EMBEDS = generation_pb2.POOLING_EMBED


def pooling_worker(worker_id: str, pooling: Any = EMBEDS, **changed: Any) -> registry_pb2.RegisterRequest:
    request = registration(worker_id, registry_pb2.ROLE_BOTH)
    request.model.pooling = pooling
    shape = {"block_size_tokens": 1, "num_layers": 0, "num_kv_heads": 0, "head_dim": 0} | changed
    endpoint = kv_transfer_pb2.TransferEndpoint(agent_id=str(uuid.uuid4()), layout=layout(**shape))
    request.endpoint.CopyFrom(endpoint)
    return request


def test_each_is_ready_alone_and_has_no_peers() -> None:
    registry = Registry(5.0)
    workers = [registry.register(pooling_worker(name), now=0.0) for name in ("a", "b")]
    for worker in workers:
        registry.set_output_open(worker.key, True)
        registry.report(registry_pb2.ReportRequest(worker_id=worker.worker_id, epoch=1), now=0.0)
        assert not registry.peers_of(worker)
    snapshot = registry.snapshot()
    assert [snapshot.is_ready(worker) for worker in snapshot.workers] == [True, True]
    assert snapshot.ready_models() == {"words"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model_fingerprint": "cd" * 32}, "LAYOUT_MISMATCH"),
        ({"dtype": "bfloat16"}, "LAYOUT_MISMATCH"),
        ({"pooling": generation_pb2.POOLING_SCORE}, "MODEL_MISMATCH"),
        ({"pooling": generation_pb2.POOLING_UNSPECIFIED}, "MODEL_MISMATCH"),
    ],
)
def test_one_name_is_one_model(changed: dict[str, Any], reason: str) -> None:
    registry = Registry(5.0)
    registry.register(pooling_worker("a"), now=0.0)
    other = pooling_worker("b", **changed)
    if not other.model.pooling:
        other = registration("b", registry_pb2.ROLE_BOTH)
    with pytest.raises(FailedPreconditionError) as refused:
        registry.register(other, now=0.0)
    assert refused.value.reason == reason


def test_its_role_is_both_for_good() -> None:
    changing, decode = pooling_worker("a"), pooling_worker("a")
    changing.changes_role, decode.role = True, registry_pb2.ROLE_DECODE
    for request in (changing, decode):
        with pytest.raises(InvalidArgumentError, match="role"):
            Registry(5.0).register(request, now=0.0)
