"""Workers with cores of their own and real weights: a decode worker that rests, or whose streams are ahead of their
targets, lends its core to the prompts; with `splitserve up` by default, also after it was killed."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engine.backends.cpu.core_exchange import SLOT_BYTES, USES
from splitserve.client import AsyncClient
from splitserve.errors import UnavailableError
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.clients.traffic import REPEATS
from tests.support.cluster.real_cluster import Cluster, held_resources, running
from tests.support.cluster.streams import Reading
from tests.support.engine.cpu_kernels import have_kernels
from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S

pytestmark = pytest.mark.slow

CORES = sorted(os.sched_getaffinity(0))
LENGTHS = (200, 100, 333)
ANSWER = 4
TPOT_MS = 1000.0
"""Far above a step, even on a busy machine: seconds without a core do not use up what a stream is ahead."""
LONG = 1800
"""Tokens of a stream that outlasts some prompts, also where those have the slower core."""
FITTED = 16
"""Decode steps after which the worker knows what one takes."""


def lent_steps(cluster: Cluster, name: str, kind: str = "prefill") -> float:
    port = cluster.members[name].wait_event("metrics.ready")["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    (family,) = (each for each in families if each.name == "splitserve_steps_with_lent_cores")
    return sum(sample.value for sample in family.samples if sample.labels.get("kind") == kind)


def lending_cluster(log_dir: Path, tmp_path: Path, model: str) -> Cluster:
    """A cluster without workers, whose workers will lend each other cores."""
    options = ["--dtype", "bfloat16", "--kv-memory-bytes", "60000000", "--no-prefix-cache"]
    options += ["--metrics-port", "0", "--core-exchange", str(tmp_path / "cores")]
    return Cluster(log_dir, model=model, engine="torch", prefill=0, decode=0, worker_options=options)


def asked_of(model: str) -> tuple[list[int], list[list[int]]]:
    """Tokens of a text, and prompts of `LENGTHS` from it."""
    tokens = load_tokenizer(model).encode(sentences(80, seed=4))
    return tokens, [tokens[length : 2 * length] for length in LENGTHS]


@pytest.mark.skipif(len(CORES) < 2, reason="one core has nobody to lend to")
@pytest.mark.skipif(not have_kernels(), reason="the machine cannot run the cpu kernels")
@pytest.mark.timeout(LEAST_TIMEOUT_S)
async def test_answers_are_the_same_with_the_neighbour_s_core(
    log_dir: Path, tmp_path: Path, smollm2: str
) -> None:
    tokens, prompts = asked_of(smollm2)
    async with running(lending_cluster(log_dir, tmp_path, smollm2)) as cluster:
        cluster.add_worker("prefill", "prefill-0", "--cpus", str(CORES[0]))
        cluster.add_worker("decode", "decode-0", "--cpus", str(CORES[1]))
        await cluster.wait_ready(prefill=1, decode=1)
        async with AsyncClient(cluster.target, timeout_s=120) as client:

            async def ask(prompt: list[int]) -> tuple[int, ...]:
                answer = await client.generate(prompt, temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
                assert answer.timings.transfer_bytes > 0
                return tuple(answer.token_ids)

            for prompt in prompts:  # the first of a size is captured, not replayed
                await ask(prompt)
            before = lent_steps(cluster, "prefill-0")
            lent = [await ask(prompt) for prompt in prompts]
            # How soon one rests, and how often, depends on what else the machine does.
            async with asyncio.timeout(PATIENCE_S):
                while lent_steps(cluster, "prefill-0") == before:
                    assert [await ask(prompt) for prompt in prompts] == lent
            # Beside a stream without a target the decode worker keeps its core.
            for _ in range(REPEATS):
                stream = Reading(client, tokens[:40], max_tokens=LONG, ignore_eos=True)
                await stream.got(2)
                before = lent_steps(cluster, "prefill-0")
                assert [await ask(prompt) for prompt in prompts] == lent
                after, lasted = lent_steps(cluster, "prefill-0"), not stream.task.done()
                await stream.leave()
                if lasted:  # else the worker has rested since
                    break
            assert after == before

            # With a target it lends what it is ahead of that.
            def begin() -> Reading:
                return Reading(client, tokens[:40], max_tokens=LONG, ignore_eos=True, tpot_ms=TPOT_MS)

            async def ask_all() -> None:
                assert [await ask(prompt) for prompt in prompts] == lent

            await lent_beside(begin, lambda: lent_steps(cluster, "prefill-0"), ask_all)
            # Its steps are computed on the prefill worker's core, too, while that has no prompt.
            await lent_beside(
                begin, lambda: lent_steps(cluster, "decode-0", "decode"), lambda: asyncio.sleep(0.05)
            )
            assert await asyncio.gather(*map(ask, prompts)) == lent
            assert lent_steps(cluster, "decode-0") == 0
        await cluster.assert_no_leaks()


@pytest.mark.skipif(len(CORES) < 2, reason="one core has nobody to lend to")
@pytest.mark.skipif(not have_kernels(), reason="the machine cannot run the cpu kernels")
@pytest.mark.parametrize("kind", ["pinned", "neutral"])
@pytest.mark.timeout(LEAST_TIMEOUT_S)
async def test_a_pair_that_has_its_host_to_itself_computes_as_one(
    log_dir: Path, tmp_path: Path, smollm2: str, kind: str
) -> None:
    """Prompts with both targets are computed where their answers are, on both cores; others are handed off."""
    _, prompts = asked_of(smollm2)
    async with running(lending_cluster(log_dir, tmp_path, smollm2)) as cluster:
        for pool, core in zip(("prefill", "decode"), CORES, strict=False):
            leaning = ["--leaning", pool] if kind == "neutral" else []
            cluster.add_worker("neutral" if leaning else pool, f"{pool}-0", "--cpus", str(core), *leaning)
        await cluster.wait_ready(prefill=1, decode=1)
        async with AsyncClient(cluster.target, timeout_s=120) as client:

            async def ask(prompt: list[int], **targets: float) -> tuple[tuple[int, ...], int]:
                answer = await client.generate(
                    prompt, temperature=0.0, max_tokens=ANSWER, ignore_eos=True, **targets
                )
                return tuple(answer.token_ids), answer.timings.transfer_bytes

            handed = [await ask(prompt) for prompt in prompts]
            assert all(size > 0 for _, size in handed)
            before = lent_steps(cluster, "decode-0")
            async with asyncio.timeout(PATIENCE_S):
                while True:  # until reports say that the prefill worker is idle
                    own = [await ask(prompt, ttft_ms=60_000, tpot_ms=TPOT_MS) for prompt in prompts]
                    assert [answer for answer, _ in own] == [answer for answer, _ in handed]
                    if not any(size for _, size in own) and lent_steps(cluster, "decode-0") > before:
                        break
            assert [await ask(prompt) for prompt in prompts] == handed
        await cluster.assert_no_leaks()


async def lent_beside(
    begin: Callable[[], Reading], steps: Callable[[], float], meanwhile: Callable[[], Awaitable[None]]
) -> None:
    """Waits until a count of lent steps grows beside a stream that meets its target, and ends it. If one ends before,
    its worker may have lent at rest: another one begins."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            stream = begin()
            await stream.got(2 * FITTED)
            before = steps()
            while steps() == before and not stream.task.done():
                await meanwhile()
            lasted, times = not stream.task.done(), list(stream.times)
            await stream.leave()
            assert (times[-1] - times[0]) / (len(times) - 1) < TPOT_MS / 1e3
            if lasted:
                return


@contextmanager
def up(settings: Path, log_dir: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`splitserve up`, and the address of its coordinator."""
    command = [sys.executable, "-m", "splitserve", "up", "--config", str(settings), *options]
    command += ["--grpc-port", "0", "--http-port", "off", "--log-dir", str(log_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            ready = next(line for line in process.stdout if line.startswith("splitserve ready on "))
            yield process, ready.split()[3]
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(PATIENCE_S)
    assert code == 0


def shared_files(process: subprocess.Popen[str]) -> list[Path]:
    """Files without a name that a supervisor holds for its workers' cores."""
    folder = Path(f"/proc/{process.pid}/fd")
    return [file for file in folder.iterdir() if "splitserve-cores" in os.readlink(file)]


def uses(file: Path) -> dict[int, int]:
    """What others have computed on the cores of each worker, since it started, by the first of these."""
    content = file.read_bytes()
    slots = [content[begin : begin + SLOT_BYTES] for begin in range(0, len(content), SLOT_BYTES)]
    first = {slot: struct.unpack_from("<H", slot, 6)[0] for slot in slots if any(slot)}
    return {core: struct.unpack_from("<I", slot, USES)[0] for slot, core in first.items()}


def worker_of(process: subprocess.Popen[str], name: str) -> psutil.Process | None:
    children = psutil.Process(process.pid).children()
    return next((child for child in children if name in child.cmdline()), None)


@pytest.mark.skipif(len(CORES) < 2, reason="one core has nobody to lend to")
@pytest.mark.skipif(not have_kernels(), reason="the machine cannot run the cpu kernels")
@pytest.mark.timeout(240)
async def test_up_lends_by_default_and_again_after_a_worker_was_killed(
    log_dir: Path, tmp_path: Path, smollm2: str
) -> None:
    settings = tmp_path / "cluster.yaml"
    engine = {"dtype": "bfloat16", "num_blocks": 200, "prefix_cache": False}
    settings.write_text(
        yaml.safe_dump({"model": smollm2, "engine": engine, "coordinator": {"hybrid": "off"}})
    )
    tokens, prompts = asked_of(smollm2)
    with up(settings, log_dir) as (process, target):
        (file,) = shared_files(process)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        async with AsyncClient(target, timeout_s=120) as client:

            async def ask(prompt: list[int]) -> tuple[int, ...]:
                answer = await client.generate(prompt, temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
                return tuple(answer.token_ids)

            for prompt in prompts:  # the first of a size is captured, not replayed
                await ask(prompt)
            decode = worker_of(process, "decode-0")
            assert decode is not None
            core = min(decode.cpu_affinity())
            before = uses(file)[core]
            lent = [await ask(prompt) for prompt in prompts]
            async with asyncio.timeout(PATIENCE_S):
                while uses(file)[core] == before:
                    assert [await ask(prompt) for prompt in prompts] == lent
            # Beside a stream without a target the decode worker keeps its core.
            for _ in range(REPEATS):
                stream = Reading(client, tokens[:40], max_tokens=LONG, ignore_eos=True)
                await stream.got(2)
                before = uses(file)[core]
                assert [await ask(prompt) for prompt in prompts] == lent
                after = uses(file)[core]
                if not stream.task.done():  # else the worker has rested since
                    break
            assert after == before
            decode.kill()  # with a stream, and maybe lending
            await stream.leave()
            deadline = time.monotonic() + PATIENCE_S
            answers: list[tuple[int, ...]] = []
            while not answers or uses(file).get(core, 0) == 0:  # the slot of the next one is new
                assert time.monotonic() < deadline
                with suppress(UnavailableError):  # until it is back
                    answers = [await ask(prompt) for prompt in prompts]
                    assert answers == lent
                await asyncio.sleep(0.05)
            again = worker_of(process, "decode-0")
            assert again is not None
            assert again.pid != decode.pid
            while held := held_resources(await client.server_info()):
                assert time.monotonic() < deadline, f"leaked: {held}"
                await asyncio.sleep(0.05)
