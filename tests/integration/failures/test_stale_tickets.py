"""Stale, replayed, foreign, out-of-range and malformed tickets and completions (failure case 5)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kv_transfer.handoff.messages import Drained, KvTicket, WriteCompletion, encode
from splitserve.client import AsyncClient
from splitserve.config.engine import EngineConfig
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, SplitserveError
from splitserve.rpc.channel import make_channel
from splitserve.v1 import decode_pb2
from splitserve.v1.decode_pb2_grpc import DecodeServiceStub
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import restarted, tokens, until, worker
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.transfer.forger import COORDINATOR_ID, forger, use_ticket
from tests.support.waiting import PATIENCE_S

PROMPT = tokens(40, 1)
ENGINE = EngineConfig(kind="simulated", num_blocks=64)


@pytest.fixture
async def cluster(log_dir: Path) -> AsyncIterator[Cluster]:
    options = ["--num-blocks", "64", "--heartbeat", "0.1", "--lease", "1", "--verify-kv", "off"]
    async with running(Cluster(log_dir, worker_options=options)) as cluster:
        yield cluster


async def _address(cluster: Cluster, name: str) -> str:
    async with AsyncClient(cluster.target) as client:
        return worker(await client.server_info(), name).address


def _done(ticket: KvTicket, token: int = 65, **changed: int) -> WriteCompletion:
    done = WriteCompletion(ticket.epoch, ticket.reservation, ticket.total_bytes, token)
    return dataclasses.replace(done, **changed)  # type: ignore[arg-type]


async def _abort(decode: DecodeServiceStub, number: int) -> None:
    request = decode_pb2.AbortRequest(request_id=f"r{number}", coordinator_id=COORDINATOR_ID, no_writer=True)
    assert (await decode.Abort(request, timeout=PATIENCE_S)).aborted


async def test_forged_completions_produce_nothing(cluster: Cluster) -> None:
    address = await _address(cluster, "decode-0")
    async with forger(cluster.target, address, ENGINE) as liar, make_channel(address) as channel:
        decode = DecodeServiceStub(channel)
        ticket = await liar.reserve(decode, PROMPT, writer=liar.agent_id)
        foreign = await liar.reserve(decode, PROMPT, writer="0" * 36)
        forged = [
            b"\xff garbage",
            b"x" * 3000,
            encode(_done(ticket, epoch=ticket.epoch + 1)),
            encode(Drained(ticket.epoch - 1, ticket.reservation)),
            encode(_done(ticket, reservation=ticket.reservation + 7)),
            encode(_done(ticket, reservation=0)),
            encode(_done(ticket, written_bytes=ticket.total_bytes - 1)),
            encode(_done(ticket, written_bytes=0)),
            encode(_done(foreign)),
            encode(Drained(foreign.epoch, foreign.reservation)),
        ]
        for message in forged:
            await liar.send(message)
        info = await until(
            cluster, lambda info: worker(info, "decode-0").rejected_handoffs == len(forged), "all are counted"
        )
        assert worker(info, "decode-0").reserved_blocks == 2 * 3
        assert not liar.outputs
        await _abort(decode, 1)
        await _abort(decode, 2)

        # The same, replayed: once it is genuine, and nothing comes of it afterwards.
        again = await liar.reserve(decode, PROMPT, writer=liar.agent_id)
        await liar.write(again, encode(_done(again)))
        await until(cluster, lambda _: len(liar.tokens_of("r3")) == 3, "a genuine completion decodes")
        for _ in range(3):
            await liar.send(encode(_done(again)))
        await until(
            cluster,
            lambda info: worker(info, "decode-0").rejected_handoffs == len(forged) + 3,
            "replays are counted",
        )
        assert len(liar.tokens_of("r3")) == 3

        # A token that no vocabulary has ends that request alone.
        odd = await liar.reserve(decode, PROMPT, writer=liar.agent_id)
        if odd.block_indices:
            await liar.write(odd, encode(_done(odd, token=2**31)))
        else:
            await liar.send(encode(_done(odd, token=2**31)))
        await until(
            cluster,
            lambda _: any(o.request_id == "r4" and o.HasField("failure") for o in liar.outputs),
            "a failure",
        )
        assert not liar.tokens_of("r4")
    await _serves(cluster)


async def test_forged_tickets_are_refused(cluster: Cluster) -> None:
    decode_address = await _address(cluster, "decode-0")
    prefill_address = await _address(cluster, "prefill-0")
    async with (
        forger(cluster.target, decode_address, ENGINE) as liar,
        make_channel(decode_address) as channel,
    ):
        decode = DecodeServiceStub(channel)
        mine = await liar.reserve(decode, PROMPT, writer=liar.agent_id)
        free = await liar.reserve(decode, tokens(40, 2))
        changes: list[tuple[KvTicket, type[SplitserveError], str]] = [
            (mine, FailedPreconditionError, "writer_agent_id"),
            (dataclasses.replace(free, decode_agent_id="1" * 36), FailedPreconditionError, "decode_agent_id"),
            (dataclasses.replace(free, decode_agent_id=""), InvalidArgumentError, "decode_agent_id"),
            (dataclasses.replace(free, block_indices=(1, 2, 10**6)), InvalidArgumentError, "block_indices"),
            (dataclasses.replace(free, block_indices=(1, 1, 2)), InvalidArgumentError, "block_indices"),
            (
                dataclasses.replace(free, total_bytes=free.total_bytes + 3),
                InvalidArgumentError,
                "total_bytes",
            ),
            (dataclasses.replace(free, cached_tokens=7), InvalidArgumentError, "cached_tokens"),
            (dataclasses.replace(free, epoch=0), InvalidArgumentError, "epoch"),
            (dataclasses.replace(free, reservation=0), InvalidArgumentError, "reservation"),
        ]
        for ticket, kind, field in changes:
            responses, error = await use_ticket(prefill_address, ticket, tokens(40, 2))
            assert isinstance(error, kind), ticket
            assert error.field == f"ticket.{field}"
            assert not responses
        info = await until(
            cluster,
            lambda info: worker(info, "prefill-0").rejected_handoffs == len(changes),
            "all are counted",
        )
        # A ticket for fewer blocks than the prompt fills is found out when the prompt is computed.
        short = dataclasses.replace(
            free,
            block_indices=free.block_indices[:1],
            total_bytes=free.total_bytes // len(free.block_indices),
        )
        _, error = await use_ticket(prefill_address, short, tokens(40, 2))
        assert error is not None
        assert error.reason == "TICKET_MISMATCH"
        responses, error = await use_ticket(prefill_address, free, tokens(40, 2))
        assert isinstance(error, FailedPreconditionError)
        assert error.reason == "TICKET_USED"
        assert not responses
        await until(
            cluster,
            lambda info: worker(info, "prefill-0").rejected_handoffs == len(changes) + 1,
            "the second use is counted",
        )
        assert not any(output.delta.token_ids for output in liar.outputs)
        assert worker(info, "prefill-0").running_requests == 0
        await _abort(decode, 1)
    await _serves(cluster)


async def test_a_ticket_of_an_earlier_boot_is_refused(cluster: Cluster) -> None:
    prefill_address = await _address(cluster, "prefill-0")
    decode_address = await _address(cluster, "decode-0")
    async with (
        forger(cluster.target, decode_address, ENGINE) as liar,
        make_channel(decode_address) as channel,
    ):
        old = await liar.reserve(DecodeServiceStub(channel), PROMPT)
    await restarted(cluster, "decode-0")
    responses, error = await use_ticket(prefill_address, old, PROMPT)
    assert isinstance(error, FailedPreconditionError)
    assert error.reason == "UNKNOWN_PEER"
    assert not responses
    await _serves(cluster)


async def _serves(cluster: Cluster) -> None:
    async with AsyncClient(cluster.target) as client:
        answers = await asyncio.gather(*(client.generate(tokens(50, 20 + n), max_tokens=8) for n in range(4)))
    for n, answer in enumerate(answers):
        assert list(answer.token_ids) == expected_tokens(tokens(50, 20 + n), 8)
    await cluster.assert_no_leaks()
