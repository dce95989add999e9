"""Tenants and admission with real weights: who is late, and a crowd that is served in fair order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from splitserve.client import AsyncClient, Completion
from splitserve.errors import ResourceExhaustedError
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.security.api_keys import key_hash, key_metadata, new_key
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.engine.reference import Reference
from tests.support.waiting import PATIENCE_S

KEYS = {name: new_key() for name in ("alice", "bob", "hasty", "strict", "root")}
TENANTS = {
    "alice": {},
    "bob": {},
    "hasty": {"ttft_slo_s": 0.001},
    "strict": {"ttft_slo_s": 0.001, "on_late": "refuse"},
    "root": {"admin": True},
}
BLOCK = 16
BLOCKS = 16
"""KV for two of the crowd's requests."""
QUEUE = 8
PROMPT_TOKENS = 64
MAX_TOKENS = 48
HELD_TOKENS = 160
"""An answer that leaves KV for none of the crowd's requests."""
FLOOD = 16
LATE = 2
TIMEOUT_S = 240.0
"""For one answer, on a busy machine."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
async def cluster(short_smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("tenants")
    listed = [{"name": name, "key_hashes": [key_hash(KEYS[name])], **rest} for name, rest in TENANTS.items()]
    (folder / "tenants.yaml").write_text(yaml.safe_dump({"tenants": listed}))
    made = Cluster(
        folder,
        model=short_smollm2,
        engine="torch",
        worker_options=[
            *("--dtype", "float32", "--num-blocks", str(BLOCKS), "--block-size", str(BLOCK)),
            *("--heartbeat", "0.1", "--require-cache-salt"),
        ],
        coordinator_options=[
            *("--tenants", str(folder / "tenants.yaml"), "--max-queued-requests", str(QUEUE)),
            # On a busy machine forecasts are high, and here the queue's bound is to be what refuses.
            *("--max-queue", "600", "--heartbeat-timeout", "60"),
        ],
        api_key=KEYS["root"],
        http=True,
    )
    async with running(made):
        yield made
        await made.assert_no_leaks()


@pytest.fixture(scope="module")
def reference(short_smollm2: str) -> Reference:
    return Reference(short_smollm2)


@pytest.fixture(scope="module")
def prompts(short_smollm2: str) -> list[list[int]]:
    """Prompts that share nothing, `PROMPT_TOKENS` each."""
    tokenizer = load_tokenizer(short_smollm2)
    return [tokenizer.encode(sentences(20, seed))[:PROMPT_TOKENS] for seed in range(FLOOD + LATE + 2)]


async def ask(client: AsyncClient, prompt: list[int], max_tokens: int = MAX_TOKENS) -> Completion:
    return await client.generate(prompt, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


async def metric(cluster: Cluster, name: str, **labels: str) -> float:
    """Sum of a metric's samples with these labels."""
    page = cluster.base_url.removesuffix("/v1") + "/metrics"
    async with httpx.AsyncClient(headers=dict(key_metadata(KEYS["root"])), timeout=PATIENCE_S) as client:
        response = await client.get(page)
    assert response.status_code == 200
    samples = [s for family in text_string_to_metric_families(response.text) for s in family.samples]
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


class Crowd:
    """Requests of several tenants that come back as they are told until they are served."""

    def __init__(self) -> None:
        self.began: list[tuple[str, bool]] = []
        """For each first token whose it is, and whether the request was let in when it first came."""
        self.refusals: list[ResourceExhaustedError] = []
        self.refused = asyncio.Event()

    async def served(self, name: str, client: AsyncClient, prompt: list[int]) -> Completion:
        """The answer, in the end."""
        at_once = True
        while True:
            try:
                return await self._once((name, at_once), client, prompt)
            except ResourceExhaustedError as error:
                at_once = False
                self.refusals.append(error)
                self.refused.set()
                await asyncio.sleep(error.retry_after_s or 0.0)

    async def _once(self, who: tuple[str, bool], client: AsyncClient, prompt: list[int]) -> Completion:
        first = True
        stream = client.stream(prompt, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        async with aclosing(stream) as items:
            async for item in items:
                if isinstance(item, Completion):
                    return item
                if first:
                    self.began.append(who)
                    first = False
        raise AssertionError("the stream ended without its last message")


async def asked_meanwhile(
    client: AsyncClient, prompt: list[int], calls: list[asyncio.Task[Completion]]
) -> None:
    """Asks again and again while these calls go on."""
    while not all(call.done() for call in calls):
        await ask(client, prompt, 1)


async def test_who_is_late_is_refused_only_where_its_tenant_wants_that(
    cluster: Cluster, prompts: list[list[int]], reference: Reference
) -> None:
    async with (
        cluster.client(api_key=KEYS["hasty"], timeout_s=TIMEOUT_S) as hasty,
        cluster.client(api_key=KEYS["strict"], timeout_s=TIMEOUT_S) as strict,
    ):
        await ask(hasty, prompts[-1], 4)  # so that rates are measured
        calls = [asyncio.create_task(ask(hasty, prompt, 4)) for prompt in prompts[:QUEUE]]
        with pytest.raises(ResourceExhaustedError) as caught:
            await asked_meanwhile(strict, prompts[QUEUE], calls)
        answers = await asyncio.gather(*calls)
    # On arrival, or, where a forecast was wrong by a millisecond, after it.
    assert caught.value.reason in ("WOULD_MISS_SLO", "WAITED_TOO_LONG")
    for answer, prompt in zip(answers, prompts[:QUEUE], strict=True):
        assert list(answer.token_ids) == reference.greedy(prompt, 4)
    reason = caught.value.reason.lower()
    assert await metric(cluster, "splitserve_admission_refused_total", reason=reason) == 1
    await cluster.assert_no_leaks()


@pytest.mark.slow
async def test_a_flood_is_bounded_refused_with_a_hint_and_does_not_hold_up_others(
    cluster: Cluster, prompts: list[list[int]], reference: Reference
) -> None:
    flood, late, warm_up = prompts[:FLOOD], prompts[FLOOD : FLOOD + LATE], prompts[FLOOD + LATE :]
    async with (
        cluster.client(api_key=KEYS["alice"], timeout_s=TIMEOUT_S) as alice,
        cluster.client(api_key=KEYS["bob"], timeout_s=TIMEOUT_S) as bob,
        cluster.client(api_key=KEYS["root"], timeout_s=TIMEOUT_S) as root,
    ):
        for prompt in warm_up:  # so that rates are measured
            await ask(alice, prompt)
        crowd = Crowd()
        held = root.stream(warm_up[0], temperature=0.0, max_tokens=HELD_TOKENS, ignore_eos=True)
        async with asyncio.timeout(360), aclosing(held), asyncio.TaskGroup() as group:
            # While this answer goes on nobody is let in: the whole crowd waits before the first is served.
            await anext(held)
            alices = [group.create_task(crowd.served("alice", alice, prompt)) for prompt in flood]
            await crowd.refused.wait()  # the queue is full
            bobs = [group.create_task(crowd.served("bob", bob, prompt)) for prompt in late]
            # A deadline within the predicted wait, which the hint is about half of: refused at once.
            hint_s = crowd.refusals[0].retry_after_s or 0.0
            with pytest.raises(ResourceExhaustedError) as caught:
                await alice.generate(warm_up[0], max_tokens=MAX_TOKENS, timeout_s=0.8 * hint_s)
            assert caught.value.reason == "WOULD_MISS_DEADLINE"
            assert caught.value.retry_after_s
    # First come, first served would have let all of alice's queue begin before bob.
    last = max(number for number, (name, _) in enumerate(crowd.began) if name == "bob")
    assert crowd.began[last:].count(("alice", True)) >= QUEUE - LATE - 3, crowd.began
    assert {refusal.reason for refusal in crowd.refusals} == {"QUEUE_FULL"}
    assert all(0.1 <= (refusal.retry_after_s or 0.0) <= 60 for refusal in crowd.refusals)
    for task in (*alices, *bobs):
        assert len(task.result().token_ids) == MAX_TOKENS
    for task, prompt in ((alices[0], flood[0]), (alices[-1], flood[-1]), (bobs[0], late[0])):
        assert list(task.result().token_ids) == reference.greedy(prompt, MAX_TOKENS)
    full = await metric(cluster, "splitserve_admission_refused_total", reason="queue_full")
    assert full == len(crowd.refusals) > 0
    assert await metric(cluster, "splitserve_admission_refused_total", reason="would_miss_deadline") == 1
    assert await metric(cluster, "splitserve_admission_queued_requests") == 0
    await cluster.assert_no_leaks()
