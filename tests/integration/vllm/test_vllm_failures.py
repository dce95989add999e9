"""The failure cases with `--engine vllm`, on processes with SmolLM2 in float32.

| case | with vLLM on both sides |
|---|---|
| 1 | `test_vllm_pair.py::test_a_killed_decode_worker_is_resumed`; a rank: `test_vllm_ranks.py` |
| 2 | not promised: vLLM's first model runner draws a resumed answer anew |
| 3, 4, 19 | `test_a_prefill_worker_killed_mid_transfer_and_started_again` |
| 5 | `test_vllm_engine.py::test_each_order_of_end_and_writer_frees_once`; the reservation table knows no engine |
| 6, 16 | `test_aborts_and_a_full_pool_leave_neighbours_alone` |
| 7 | `test_vllm_pair.py::test_clients_that_leave` |
| 8 | `test_a_thawed_prefill_worker_changes_no_other_answer`, `test_a_thawed_decode_worker_frees_everything` |
| 9 | `test_lost_and_repeated_notifications_change_no_answer` |
| 10 | `test_vllm_families.py`, `test_vllm_pair.py::test_greedy_tokens_equal_transformers` |
| 11 | `test_another_engine_is_refused_at_registration`; dtype and block size: `test_vllm_attacks.py` |
| 13 | `test_vllm_engine.py::test_what_never_fits_is_refused`; the coordinator's queue knows no engine |
| 14 | `test_a_stream_goes_on_beside_long_prompts` |
| 15 | `test_a_hundred_cancelled_prompts_leave_no_work_behind` |
| 18 | `test_both_pools_shrink_under_load` |
| 20 | `python -m bench.chaos --engine vllm` |
| 21 | `test_wrong_input_affects_nothing_else` |
| 22 | `test_vllm_engine.py::test_prefix_hits`; keys and quotas are the coordinator's |
| 24 | `test_after_sigkill_of_the_coordinator_workers_free_everything` |

12 is about lanes, which vLLM does not measure; 17 and 23 are the autoscaler's and the coordinator's alone.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable

import pytest

from splitserve.client import AsyncClient
from splitserve.errors import InvalidArgumentError, UnavailableError
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.cluster.ports import free_port
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading, busy, mid_prompt, total, until, worker
from tests.support.engine.reference import Reference
from tests.support.waiting import PATIENCE_S

CHUNK = 64
LONG = 900
"""Tokens: more than a second of chunks."""
TICKET_S = 30.0
"""Longer than what waits for prefill takes on a busy machine."""
MAX_TOKENS = 6
OPTIONS = ["--dtype", "float32", "--context-tokens", "1024", "--max-step-tokens", str(CHUNK)]
OPTIONS += ["--heartbeat", "0.1", "--ticket", str(TICKET_S), "--quarantine", "1", "--lease", "1"]
AT_WORKERS = ["--admission", "off", "--heartbeat-timeout", "2"]

Answer = Callable[[list[int], int], list[int]]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def text_tokens(smollm2: str) -> list[int]:
    return load_tokenizer(smollm2).encode(sentences(300, seed=5))


@pytest.fixture(scope="module")
def greedy(smollm2: str) -> Answer:
    """What `transformers` answers."""
    return Reference(smollm2).greedy


@pytest.fixture(scope="module")
async def cluster(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    setup = Cluster(
        tmp_path_factory.mktemp("logs"),
        model=smollm2,
        engine="vllm",
        prefill=2,
        decode=2,
        worker_options=[*OPTIONS, "--kv-memory-bytes", "150000000"],
        coordinator_options=[*AT_WORKERS, "--grpc-port", str(free_port())],
    )
    async with running(setup) as cluster:
        yield cluster


@pytest.fixture(scope="module")
async def small(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A pair with few blocks. The first completion is lost, and every second one comes twice."""
    setup = Cluster(
        tmp_path_factory.mktemp("logs"),
        model=smollm2,
        engine="vllm",
        worker_options=[*OPTIONS, "--num-blocks", "20", "--context-tokens", "256", "--no-prefix-cache"],
        faults={"drop_notification": {"at": [1]}, "duplicate_notification": {"every": 2}, "hold_s": 0.4},
        coordinator_options=AT_WORKERS,
    )
    async with running(setup) as cluster:
        yield cluster


async def test_a_prefill_worker_killed_mid_transfer_and_started_again(
    cluster: Cluster, text_tokens: list[int], greedy: Answer
) -> None:
    """Cases 3, 4 and 19."""
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        reading, info = await mid_prompt(
            cluster,
            lambda n: Reading(client, text_tokens[n : n + LONG], max_tokens=MAX_TOKENS, temperature=0.0),
        )
        victim = busy(info, "prefill")
        cluster.members[victim].kill()
        answer = await reading.task
        assert list(answer.token_ids) == greedy(reading.prompt, MAX_TOKENS)
        assert (answer.served_by.attempts, answer.served_by.prefill_worker != victim) == (2, True)
        await cluster.assert_no_leaks()
        cluster.members[victim].start()
        await cluster.wait_ready()
        prompts = [text_tokens[7 * n : 7 * n + 40] for n in range(12)]
        answers = await asyncio.gather(*(client.generate(p, max_tokens=2, temperature=0.0) for p in prompts))
        assert victim in {answer.served_by.prefill_worker for answer in answers}
        await cluster.assert_no_leaks()


async def test_a_thawed_prefill_worker_changes_no_other_answer(
    cluster: Cluster, text_tokens: list[int], greedy: Answer
) -> None:
    """Case 8: it stops in the middle of a prompt, and goes on when its ticket has expired."""
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        reading, info = await mid_prompt(
            cluster,
            lambda n: Reading(
                client, text_tokens[100 + n : 100 + n + LONG], max_tokens=MAX_TOKENS, temperature=0.0
            ),
        )
        frozen = cluster.members[busy(info, "prefill")]
        frozen.signal(signal.SIGSTOP)
        answer = await reading.task
        assert list(answer.token_ids) == greedy(reading.prompt, MAX_TOKENS)
        assert answer.served_by.prefill_worker != frozen.name
        await cluster.assert_no_leaks()
        owners = [Reading(client, text_tokens[n : n + 200], max_tokens=30, temperature=0.0) for n in range(6)]
        for owner in owners:
            await owner.got(2)
        frozen.signal(signal.SIGCONT)
        for owner in owners:
            await owner.task
            assert owner.tokens == greedy(owner.prompt, 30)
        await cluster.wait_ready()
        await cluster.assert_no_leaks()


async def test_a_thawed_decode_worker_frees_everything(
    cluster: Cluster, text_tokens: list[int], greedy: Answer
) -> None:
    """Case 8: the other one takes its streams."""
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        prompts = [text_tokens[n : n + 60] for n in range(4)]
        readings = [
            Reading(client, prompt, max_tokens=60, temperature=0.0, ignore_eos=True) for prompt in prompts
        ]
        for reading in readings:
            await reading.got(3)
        frozen = cluster.members["decode-0"]
        frozen.signal(signal.SIGSTOP)
        for reading in readings:
            await reading.task
            assert reading.tokens == greedy(reading.prompt, 60)
        frozen.signal(signal.SIGCONT)
        await cluster.wait_ready()
        await cluster.assert_no_leaks()


async def test_a_hundred_cancelled_prompts_leave_no_work_behind(
    cluster: Cluster, text_tokens: list[int]
) -> None:
    """Case 15: they are three minutes of work, were it done."""
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        long = [Reading(client, text_tokens[n : n + LONG], max_tokens=2) for n in range(100)]
        await until(
            cluster, lambda info: total(info, "decode", "waiting_reservations") > 20, "they wait for room"
        )
        await asyncio.gather(*(reading.leave() for reading in long))
        short = await client.generate(text_tokens[5:300], max_tokens=2)
        assert short.timings.ttft_ms < 20_000
        await cluster.assert_no_leaks()


async def test_a_stream_goes_on_beside_long_prompts(cluster: Cluster, text_tokens: list[int]) -> None:
    """Case 14: the decode workers compute no prompt."""
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        stream = Reading(client, text_tokens[200:240], max_tokens=600, ignore_eos=True)
        await stream.got(2)
        long, _ = await mid_prompt(
            cluster, lambda n: Reading(client, text_tokens[200 + n : 200 + n + LONG], max_tokens=2)
        )
        before = len(stream.tokens)
        await long.got(1)
        assert len(stream.tokens) > before
        await long.task
        await stream.leave()
        await cluster.assert_no_leaks()


@pytest.mark.slow
async def test_both_pools_shrink_under_load(cluster: Cluster, text_tokens: list[int], greedy: Answer) -> None:
    """Case 18: no request fails."""
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        readings = [
            Reading(client, text_tokens[13 * n : 13 * n + 150], max_tokens=30, temperature=0.0)
            for n in range(16)
        ]
        await readings[0].got(2)
        leaving = [cluster.members[name] for name in ("prefill-1", "decode-1")]
        codes = asyncio.gather(*(asyncio.to_thread(member.terminate) for member in leaving))
        for reading in readings:
            await reading.task
            assert reading.tokens == greedy(reading.prompt, 30)
        assert await codes == [0, 0]
        for member in leaving:
            member.start()
        await cluster.wait_ready()
        await cluster.assert_no_leaks()


async def test_wrong_input_affects_nothing_else(cluster: Cluster, text_tokens: list[int]) -> None:
    """Case 21."""
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        reading = Reading(client, text_tokens[:50], max_tokens=100, ignore_eos=True)
        await reading.got(2)
        for prompt, options in (
            ([], {}),
            ([2**31], {}),
            (text_tokens * 10, {}),
            (text_tokens[:5], {"temperature": float("nan")}),
            (text_tokens[:5], {"max_tokens": 10**9}),
        ):
            with pytest.raises(InvalidArgumentError):
                await client.generate(prompt, **options)
        await reading.task
        await cluster.assert_no_leaks()


async def test_another_engine_is_refused_at_registration(cluster: Cluster) -> None:
    """Case 11: its KV lies otherwise."""
    other = cluster.add_worker("decode", "decode-9", "--engine", "torch")
    assert await asyncio.to_thread(other.process.wait, PATIENCE_S) != 0
    assert "KV layout differs" in other.log_path.read_text()
    del cluster.members[other.name]


async def test_after_sigkill_of_the_coordinator_workers_free_everything(
    cluster: Cluster, text_tokens: list[int], greedy: Answer
) -> None:
    """Case 24. The last test of this cluster: its coordinator drains at the end."""
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        decoding = Reading(client, text_tokens[:60], max_tokens=800, ignore_eos=True)
        await decoding.got(3)
        computed, _ = await mid_prompt(
            cluster, lambda n: Reading(client, text_tokens[60 + n : 60 + n + LONG], max_tokens=50)
        )
        cluster.members["coordinator"].kill()
        for reading in (decoding, computed):
            with pytest.raises(UnavailableError):
                await reading.task
    coordinator = cluster.members["coordinator"]
    coordinator.start()
    coordinator.wait_event("coordinator.ready")
    await cluster.wait_ready()
    await cluster.assert_no_leaks()
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        last = Reading(client, text_tokens[:60], max_tokens=20, temperature=0.0, ignore_eos=True)
        await last.got(2)
        coordinator.signal(signal.SIGTERM)
        await last.task
        assert last.tokens == greedy(last.prompt, 20)
    assert await asyncio.to_thread(coordinator.process.wait, 30) == 0


async def test_lost_and_repeated_notifications_change_no_answer(
    small: Cluster, text_tokens: list[int], greedy: Answer
) -> None:
    """Case 9."""
    async with AsyncClient(small.target, timeout_s=300) as client:
        attempts = 0
        for n in range(6):
            prompt = text_tokens[11 * n : 11 * n + 90]
            answer = await client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0)
            assert list(answer.token_ids) == greedy(prompt, MAX_TOKENS)
            attempts += answer.served_by.attempts
        assert attempts == 7, "one completion was lost"
        assert worker(await client.server_info(), "decode-0").rejected_handoffs >= 2, "copies are counted"
        await small.assert_no_leaks()


async def test_aborts_and_a_full_pool_leave_neighbours_alone(
    small: Cluster, text_tokens: list[int], greedy: Answer
) -> None:
    """Cases 6 and 16: of twenty requests three have room on decode, and every other client leaves."""
    async with AsyncClient(small.target, timeout_s=300) as client:
        readings = [
            Reading(client, text_tokens[9 * n : 9 * n + 100 + n], max_tokens=20, temperature=0.0)
            for n in range(20)
        ]
        await until(small, lambda info: worker(info, "decode-0").waiting_reservations > 3, "they wait")
        await asyncio.gather(*(_leave(reading, n) for n, reading in enumerate(readings[::2])))
        for reading in readings[1::2]:
            await reading.task
            assert reading.tokens == greedy(reading.prompt, len(reading.tokens))
        await small.assert_no_leaks()


async def _leave(reading: Reading, token: int) -> None:
    """At another point of its life each: before the first token, and after up to nine."""
    if token:
        await reading.got(token)
    await reading.leave()
