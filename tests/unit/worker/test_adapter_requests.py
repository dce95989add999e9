"""Requests that name an adapter: what a worker takes, and that a ticket is for one adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.engine import EngineRequest
from engine.core.model_runner import ModelFacts
from kv_transfer.handoff.messages import KvTicket
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from splitserve.errors import ConfigError, FailedPreconditionError, InvalidArgumentError
from splitserve.generation.kv_blocks import Adapter, chain_salt
from splitserve.v1 import decode_pb2, generation_pb2
from worker.build import build_engine
from worker.messages import engine_request

RED = Adapter("red", "1" * 64)
FACTS = ModelFacts(64, 257, frozenset({256}), {"red": RED})
BASE_ONLY = ModelFacts(64, 257, frozenset({256}))


def asked(adapter: Adapter | None, facts: ModelFacts = FACTS) -> EngineRequest:
    message = decode_pb2.ReserveRequest(
        request_id="r", token_ids=[1, 2], cache_salt=b"alice", stop=generation_pb2.StopParams(max_tokens=1)
    )
    if adapter is not None:
        message.adapter.CopyFrom(generation_pb2.AdapterRef(**adapter._asdict()))
    message.timeout.FromSeconds(1)
    return engine_request(message, engine_id="e", facts=facts, now=0.0, prefill_only=False)


def test_an_adapter_has_blocks_of_its_own() -> None:
    base, red = asked(None), asked(RED)
    assert (base.adapter, base.adapter_fingerprint, base.cache_salt) == (None, "", b"alice")
    assert (red.adapter, red.adapter_fingerprint) == (RED, RED.fingerprint)
    assert red.cache_salt == chain_salt(b"alice", RED)


@pytest.mark.parametrize(
    ("adapter", "facts"),
    [(Adapter("blue", "1" * 64), FACTS), (Adapter("red", "2" * 64), FACTS), (RED, BASE_ONLY)],
)
def test_an_adapter_that_is_not_this_worker_s_is_refused(adapter: Adapter, facts: ModelFacts) -> None:
    with pytest.raises(FailedPreconditionError) as caught:
        asked(adapter, facts)
    assert (caught.value.reason, caught.value.field) == ("ADAPTER_MISMATCH", "adapter")


def ticket(fingerprint: str) -> KvTicket:
    return KvTicket("agent", 7, 3, (4,), 0, 64, 110.0, adapter_fingerprint=fingerprint)


def test_a_ticket_is_for_one_adapter() -> None:
    for fingerprint in ("", RED.fingerprint):
        received = KvTicket.from_proto(ticket(fingerprint).to_proto(100.0), 100.0)
        assert received.adapter_fingerprint == fingerprint
        received.require_adapter(fingerprint)
        with pytest.raises(FailedPreconditionError) as caught:
            received.require_adapter("2" * 64)
        assert (caught.value.reason, caught.value.field) == ("ADAPTER_MISMATCH", "ticket.adapter_fingerprint")


def test_a_fingerprint_of_another_length_is_refused() -> None:
    message = ticket(RED.fingerprint).to_proto(100.0)
    message.adapter_fingerprint = "1" * 63
    with pytest.raises(InvalidArgumentError) as caught:
        KvTicket.from_proto(message, 100.0)
    assert caught.value.field == "ticket.adapter_fingerprint"


def test_the_torch_engine_takes_no_adapters() -> None:
    settings = EngineConfig(kind="torch", adapters={"red": Path("red")})
    with pytest.raises(ConfigError, match="only engine vllm") as caught:
        build_engine(WorkerConfig(worker_id="w", model="nothing", engine=settings), lambda call: None)
    assert caught.value.field == "engine.adapters"
