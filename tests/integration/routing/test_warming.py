"""A new worker computes the hottest prefixes before it gets requests: with scripted workers, and with real weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.request.inference_request import Caller
from coordinator.request.sending import WaitingOutput
from splitserve.errors import TransferError
from splitserve.v1 import inference_pb2
from tests.support.cluster.fake_cluster import FakeCluster, ask, fake_cluster
from tests.support.cluster.fake_workers import FakePrefill
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.registrations import BLOCK_SIZE
from tests.support.cluster.streams import tokens, until, worker
from tests.support.engine.reference import Reference
from tests.support.engine.tiny_models import make_tiny_model
from tests.support.journal import settled

HOT = [7] * 2 * BLOCK_SIZE
OTHER = [8] * BLOCK_SIZE


async def serve(cluster: FakeCluster, prompt: list[int], salt: bytes = b"") -> None:
    """One request of a tenant with this salt."""
    request = ask(2)
    request.token_ids.ids.extend(prompt)

    async def send(_message: inference_pb2.GenerateResponse) -> None:
        pass

    await cluster.coordinator.api.generate(request, Caller("t", cache_salt=salt), WaitingOutput(send))


async def heat(cluster: FakeCluster) -> None:
    """HOT is hot under one salt; OTHER is not, because its two requests are of two tenants."""
    for last in (1, 2):
        await serve(cluster, [*HOT, last], b"t")
    await serve(cluster, [*OTHER, 1], b"t")
    await serve(cluster, [*OTHER, 1])


def is_joined(cluster: FakeCluster, new: FakePrefill) -> bool:
    known = cluster.coordinator.registry.get((new.worker_id, new.epoch))
    return known is not None and known.joined


async def test_a_new_worker_is_sent_hot_prefixes_under_their_salt_before_it_joins() -> None:
    async with fake_cluster() as cluster:
        await heat(cluster)
        new = FakePrefill("late", cluster.address, cluster.decode_of)
        cluster.prefills.append(new)
        new.first_token_gate.close()
        await new.start()
        sent = await new.calls.wait()
        assert list(sent.token_ids) == HOT
        assert (sent.cache_salt, sent.stop.max_tokens, sent.HasField("ticket")) == (b"t", 1, False)
        assert (sent.precedence.class_rank, sent.precedence.within_tenant) == (-1, -100)
        assert not is_joined(cluster, new)
        for last in range(4):  # requests do not wait for it, nor go there
            await serve(cluster, [*HOT, last], b"t")
        assert len(new.calls.entries) == 1
        new.first_token_gate.open()
        await settled(lambda: is_joined(cluster, new))
        assert len(new.calls.entries) == 1


async def test_a_worker_that_refuses_to_be_warmed_joins_all_the_same() -> None:
    async with fake_cluster() as cluster:
        await heat(cluster)
        new = FakePrefill("late", cluster.address, cluster.decode_of)
        cluster.prefills.append(new)
        new.failures = [TransferError("scripted")]
        await new.start()
        await settled(lambda: is_joined(cluster, new))
        assert len(new.calls.entries) == 1


async def test_nothing_is_sent_where_warming_is_off() -> None:
    async with fake_cluster(warm_prefixes=0) as cluster:
        await heat(cluster)
        new = await cluster.add_prefill("late")
        await cluster.all_ready()
        assert new.calls.entries == []


@pytest.mark.timeout(300)
async def test_the_first_prompt_of_a_warmed_worker_is_cached_there_and_answered_as_before(
    tmp_path: Path, log_dir: Path
) -> None:
    folder = str(make_tiny_model("llama", tmp_path))
    hot = tokens(100, 1)
    prompts = [hot + tokens(9, seed) for seed in (2, 3, 4)]
    reference = Reference(folder)
    options = ["--dtype", "float32", "--num-blocks", "128"]
    cluster = Cluster(log_dir, model=folder, engine="torch", worker_options=options)
    async with running(cluster), cluster.client() as client:
        for prompt in prompts[:2]:
            answer = await client.generate(prompt, temperature=0.0, max_tokens=8, ignore_eos=True)
            assert list(answer.token_ids) == reference.greedy(prompt, 8)
        cluster.add_worker("prefill", "prefill-1")
        await cluster.wait_ready(prefill=2)
        warmed = cluster.members["coordinator"].wait_event("worker.warmed")
        assert (warmed["worker_id"], warmed["prefixes"], warmed["tokens"]) == ("prefill-1", 1, 96)
        cluster.members["prefill-0"].terminate()
        await until(cluster, lambda info: not worker(info, "prefill-0").worker_id, "the first one is gone")
        answer = await client.generate(prompts[2], temperature=0.0, max_tokens=8, ignore_eos=True)
        assert answer.served_by.prefill_worker == "prefill-1"
        assert answer.usage.cached_prompt_tokens == 96
        assert list(answer.token_ids) == reference.greedy(prompts[2], 8)
        await cluster.assert_no_leaks()
