"""Two coordinators of the same workers: a stream goes on at the other one, without gap or repetition, when one dies."""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from splitserve.errors import UnavailableError
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.clients.traffic import REPEATS
from tests.support.cluster.ports import free_port
from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading, tokens, until, worker
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import PATIENCE_S, SLACK_S

LEASE_S = 2.0
OPTIONS = ["--simulated-step-s", "0.02", "--simulated-prefill-token-s", "0.0001", "--lease", str(LEASE_S)]

TOO_LONG = 100_000
"""Tokens: half an hour of decoding."""

pytestmark = pytest.mark.timeout(240)


@asynccontextmanager
async def two_coordinators(
    log_dir: Path, **options: object
) -> AsyncIterator[tuple[Cluster, ServiceProcess, str]]:
    """A cluster, a second coordinator of its workers, and that one's address."""
    port = free_port()
    arguments = ["coordinator", "--grpc-port", str(port), "--http-port", "off"]
    other, target = ServiceProcess("other", arguments, log_dir), f"127.0.0.1:{port}"
    more = [*options.pop("worker_options", ()), "--coordinator", target]  # type: ignore[misc]
    cluster = Cluster(log_dir, worker_options=more, **options)  # type: ignore[arg-type]
    other.start()
    try:
        other.wait_event("coordinator.ready")
        async with running(cluster), AsyncClient(target) as client:
            await client.wait_ready(PATIENCE_S)
            yield cluster, other, target
    finally:
        other.terminate()


@pytest.mark.slow
async def test_streams_go_on_at_the_other_coordinator(log_dir: Path) -> None:
    async with (
        two_coordinators(log_dir, worker_options=OPTIONS) as (cluster, _, target),
        AsyncClient(f"{cluster.target},{target}") as client,
    ):
        readings = [Reading(client, tokens(60, n), max_tokens=150, ignore_eos=True) for n in range(4)]
        late = Reading(client, tokens(60, 9), max_tokens=3000, ignore_eos=True)
        for reading in (*readings, late):
            await reading.got(5)
        cluster.members["coordinator"].kill()
        for reading in readings:
            answer = await reading.task
            assert reading.tokens == expected_tokens(reading.prompt, 150)
            assert answer.usage.completion_tokens == 150
            assert answer.usage.prompt_tokens == 60
        # Leaving a stream that went on ends it there.
        await late.got(160)
        await late.leave()
        cluster.target = target
        await cluster.assert_no_leaks()


@pytest.mark.slow
async def test_a_stream_survives_one_coordinator_after_the_other(log_dir: Path) -> None:
    """The first is started again while the second serves, and gets the stream back when that one dies."""
    options = {"worker_options": OPTIONS, "coordinator_options": ["--grpc-port", str(free_port())]}
    async with two_coordinators(log_dir, **options) as (cluster, other, target):
        first = cluster.members["coordinator"]
        async with (
            AsyncClient(f"{cluster.target},{target}") as client,
            AsyncClient(cluster.target) as of_first,
        ):
            reading = Reading(client, tokens(40, 1), max_tokens=TOO_LONG, ignore_eos=True)
            await reading.got(5)
            first.kill()
            before = len(reading.tokens)
            await reading.got(before + 20)
            first.start()
            await of_first.wait_ready(PATIENCE_S)
            other.kill()
            before = len(reading.tokens)
            await reading.got(before + 60)
            assert reading.tokens == expected_tokens(reading.prompt, len(reading.tokens))
            await reading.leave()
            await cluster.assert_no_leaks()


async def test_a_drained_coordinator_hands_its_streams_over(log_dir: Path) -> None:
    """One whose drain is shorter than a stream ends it; the client goes on elsewhere."""
    options = {"worker_options": OPTIONS, "coordinator_options": ["--drain", "0"]}
    async with (
        two_coordinators(log_dir, **options) as (cluster, _, target),
        AsyncClient(f"{cluster.target},{target}") as client,
    ):
        reading = Reading(client, tokens(40, 2), max_tokens=150, ignore_eos=True)
        await reading.got(5)
        assert await asyncio.to_thread(cluster.members["coordinator"].terminate) == 0
        await reading.task
        assert reading.tokens == expected_tokens(reading.prompt, 150)
        cluster.target = target
        await cluster.assert_no_leaks()


async def test_one_dies_and_the_other_never_notices(log_dir: Path) -> None:
    async with (
        two_coordinators(log_dir, worker_options=OPTIONS) as (cluster, _, target),
        AsyncClient(cluster.target) as ours,
        AsyncClient(target) as theirs,
        AsyncClient(f"{cluster.target},{target}") as either,
    ):
        doomed = [Reading(ours, tokens(60, n), max_tokens=TOO_LONG) for n in range(3)]
        safe = [Reading(theirs, tokens(60, 10 + n), max_tokens=TOO_LONG) for n in range(3)]
        for reading in (*doomed, *safe):
            await reading.got(3)
        cluster.target = target
        # Those of the other coordinator, too: routing counts them.
        await until(cluster, lambda info: worker(info, "decode-0").running_requests == 6, "all are seen")
        cluster.members["coordinator"].kill()
        killed_s = time.monotonic()
        for reading in doomed:
            with pytest.raises(UnavailableError):
                await reading.task
        for reading, before in [(reading, len(reading.tokens)) for reading in safe]:
            await reading.got(before + 100)
            assert reading.tokens == expected_tokens(reading.prompt, len(reading.tokens))
            await reading.leave()
        assert (await either.models())[0].ready, "a client of both asks the one that lives"
        await cluster.assert_no_leaks()
        assert time.monotonic() - killed_s < LEASE_S + SLACK_S


@pytest.fixture(scope="module")
def prompts(short_smollm2: str) -> list[list[int]]:
    encode = load_tokenizer(short_smollm2).encode
    return [encode(sentences(3, seed=n)) for n in range(2)]


@pytest.mark.slow
async def test_answers_of_a_real_model_are_the_same(
    short_smollm2: str, prompts: list[list[int]], log_dir: Path
) -> None:
    """Greedy, sampled with a seed, and sampled with one that the server chose; ids, texts and log-probabilities."""
    length = 200
    options = ["--dtype", "float32", "--num-blocks", "300", "--heartbeat", "0.1", "--lease", "2"]
    asks = [
        (prompts[0], {"temperature": 0.0, "logprobs": 2}),
        (prompts[1], {"temperature": 1.0, "seed": 11, "stop": "never to be found"}),
        (prompts[1], {"temperature": 1.0, "top_p": 0.95}),
    ]
    common = {"max_tokens": length, "ignore_eos": True, "timeout_s": 200.0}
    cluster_options = {"model": short_smollm2, "engine": "torch", "worker_options": options}
    async with (
        two_coordinators(log_dir, **cluster_options) as (cluster, _, target),
        AsyncClient(f"{cluster.target},{target}") as client,
        AsyncClient(target) as of_other,
    ):
        for _ in range(REPEATS):
            readings = [Reading(client, prompt, **ask, **common) for prompt, ask in asks]
            for reading in readings:
                await reading.got(4)
            if all(len(reading.tokens) < length for reading in readings):
                break
            await asyncio.gather(*(reading.task for reading in readings))
        assert all(len(reading.tokens) < length for reading in readings)
        cluster.members["coordinator"].kill()
        answers = [await reading.task for reading in readings]
        assert client.target == target
        again = [{**ask, "seed": answer.seed} for (_, ask), answer in zip(asks, answers, strict=True)]
        undisturbed = await asyncio.gather(
            *(
                of_other.generate(prompt, **ask, **common)
                for (prompt, _), ask in zip(asks, again, strict=True)
            )
        )
        for answer, alone in zip(answers, undisturbed, strict=True):
            assert answer.token_ids == alone.token_ids
            assert answer.text == alone.text
            assert [entry.token_id for entry in answer.logprobs] == [e.token_id for e in alone.logprobs]
        cluster.target = target
        await cluster.assert_no_leaks()


async def test_a_request_that_may_have_ended_a_coordinator_goes_to_no_other(log_dir: Path) -> None:
    """The first dies while it holds requests that have no token yet. Those with a grammar end, the others go on."""
    options = {"coordinator_options": ["--no-worker-wait", "600"]}
    async with two_coordinators(log_dir, **options) as (cluster, _, target), AsyncClient(target) as of_other:
        decode = cluster.members["decode-0"]
        decode.kill()
        command = [sys.executable, "-m", "launcher", "generate", "--target", f"{cluster.target},{target}"]
        command += ["--max-tokens", "2"]

        async def generate(*arguments: str) -> tuple[int | None, str]:
            """Exit code and errors of the command line."""
            process = await asyncio.create_subprocess_exec(*command, *arguments, stdout=DEVNULL, stderr=PIPE)
            _, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
            return process.returncode, errors.decode()

        with_grammar = [["a", "--regex", "a*"], ["a", "--json-schema", '{"const": 1}']]
        without = [["7" * 900], ["a", "--raw"]]
        doomed = [asyncio.create_task(generate(*arguments)) for arguments in with_grammar]
        others = [asyncio.create_task(generate(*arguments)) for arguments in without]
        await until(cluster, lambda info: info.running_requests == 4, "it holds them")
        cluster.members["coordinator"].kill()
        broke = f"error: the connection to {cluster.target} broke before the answer was complete"
        for code, errors in await asyncio.gather(*doomed):
            refused = "no other is asked, as this request's grammar may have ended it"
            assert (code, errors) == (1, f"{broke}; {refused}\n")
        decode.start()
        await of_other.wait_ready()
        assert await generate("Hi") == (0, "")
        assert await asyncio.gather(*others) == [(0, ""), (0, "")]
        assert len(await of_other.request_records()) == 3
        cluster.target = target
        await cluster.assert_no_leaks()
