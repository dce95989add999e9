"""Workers' cache events on their way into the coordinator's index: gaps, restarts, tenants."""

from __future__ import annotations

from coordinator.request.inference_request import Caller
from coordinator.request.sending import WaitingOutput
from splitserve.generation.kv_blocks import block_keys, extend_block_hashes
from splitserve.v1 import inference_pb2
from tests.support.cluster.fake_cluster import FakeCluster, ask, fake_cluster
from tests.support.cluster.fake_workers import FakeWorker
from tests.support.journal import settled

TOKENS = list(range(40))
BLOCKS = 2


def hashes(tokens: list[int] = TOKENS, salt: bytes = b"") -> list[bytes]:
    made: list[bytes] = []
    extend_block_hashes(made, tokens, 16, salt, len(tokens) // 16)
    return made


def held(cluster: FakeCluster, worker: FakeWorker, tokens: list[int] = TOKENS, salt: bytes = b"") -> int:
    index = cluster.coordinator.registry.prefixes
    hits = index.hits(block_keys(tokens, 16, salt, 100), 0.0)
    return hits.blocks(index.slot_of((worker.worker_id, worker.epoch)))


def request(tokens: list[int] = TOKENS, max_tokens: int = 2) -> inference_pb2.GenerateRequest:
    made = ask(max_tokens)
    made.token_ids.ids.extend(tokens)
    return made


async def served(cluster: FakeCluster, asked: inference_pb2.GenerateRequest, caller: Caller) -> str:
    """The prefill worker that this caller's request went to."""
    messages: list[inference_pb2.GenerateResponse] = []

    async def send(message: inference_pb2.GenerateResponse) -> None:
        messages.append(message)

    await cluster.coordinator.api.generate(asked, caller, WaitingOutput(send))
    return messages[-1].done.served_by.prefill_worker


async def test_the_index_follows_a_workers_cache() -> None:
    async with fake_cluster(prefill=2) as cluster:
        one, other = cluster.prefills
        for block_hash in hashes():
            one.kv_events.stored(block_hash)
        await settled(lambda: held(cluster, one) == BLOCKS)
        assert held(cluster, other) == 0
        one.kv_events.removed(hashes()[1])
        await settled(lambda: held(cluster, one) == 1)
        for _ in range(4):
            assert (await cluster.answer(request())).done is not None
        assert len(one.calls.entries) == 4


async def test_a_lost_message_is_asked_for_again() -> None:
    async with fake_cluster() as cluster:
        worker = cluster.prefills[0]
        worker.kv_events.stored(hashes()[0])
        await settled(lambda: held(cluster, worker) == 1)
        worker.kv_events.stored(hashes()[1])
        worker.cache_sessions.entries[0].next_events()  # it never gets there
        worker.kv_events.stored(b"x" * 32)
        await settled(lambda: held(cluster, worker) == BLOCKS)
        assert len(worker.cache_sessions.entries) == 1


async def test_a_dropped_worker_holds_nothing_and_a_new_boot_begins_anew() -> None:
    async with fake_cluster(prefill=1) as cluster:
        worker = cluster.prefills.pop()
        for block_hash in hashes():
            worker.kv_events.stored(block_hash)
        await settled(lambda: held(cluster, worker) == BLOCKS)
        await worker.stop()
        await settled(lambda: cluster.coordinator.registry.get((worker.worker_id, worker.epoch)) is None)
        assert held(cluster, worker) == 0
        again = await cluster.add_prefill(worker.worker_id)
        await cluster.all_ready()
        assert held(cluster, again) == 0


async def test_a_burst_of_equal_prompts_goes_to_one_worker_and_not_for_another_tenant() -> None:
    a, b = Caller("a", cache_salt=b"a" * 16), Caller("b", cache_salt=b"b" * 16)
    async with fake_cluster(prefill=3) as cluster:
        homes = {await served(cluster, request(), a) for _ in range(6)}
        assert len(homes) == 1
        assert not cluster.coordinator.registry.prefixes.hits(block_keys(TOKENS, 16, b"b" * 16, 9), 0.0)
        assert len({await served(cluster, request(), b) for _ in range(6)}) == 1
        # What was sent counts as load until the next report.
        loads = cluster.coordinator.registry.loads.prefill
        await settled(lambda: not any(load.sent_tokens for load in loads.values()))
        others = {await served(cluster, request([n] * 40), a) for n in range(6)}
        assert len(others) == 3
