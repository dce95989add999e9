"""A trace with block ids on a real cluster, without and with a host tier: hits and TTFT as the clients see them.

A block of the trace, 512 tokens, becomes one KV block of 16 tokens, so that the longest prompts fit the model's context
and prefixes are shared exactly as in the trace. Of the trace's conversations a part is taken, each of them whole: what
is found again is found within a conversation. Arrivals keep their order and their bursts; time is scaled so that
computing every prompt token would take the given share of it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from autoscaler.simulation.traces.trace import BLOCK_TOKENS, TraceRequest, load_trace
from autoscaler.sizing.model_shape import GivenShape, read_config, shape_of
from bench.asking import HIGHEST_TOKEN, LOWEST_TOKEN, AskedAnswer, ask, random_prompt
from bench.cluster import running_cluster
from bench.kv_tiers.shares import ReplayedPrompt, share_of
from bench.kv_tiers.ttft import TraceRow
from splitserve.client import AsyncClient
from splitserve.config.cluster import ClusterConfig
from splitserve.config.coordinator import AdmissionConfig, CoordinatorConfig
from splitserve.config.engine import EngineConfig
from splitserve.errors import SplitserveError
from splitserve.models.sources import resolve_model

FRONT = "front"
BLOCK = 16
SCALE = BLOCK_TOKENS // BLOCK
MAX_TOKENS = 4
PATIENT = CoordinatorConfig(admission=AdmissionConfig(max_queue_s=3600.0), request_timeout_s=3600.0)
"""Nothing is refused: a prompt that waits long counts with its time."""
WARM_UPS = 6
POOL_PART, HOST_TIMES = 16, 8


@dataclass(frozen=True)
class ScaledPrompt:
    """A prompt of the trace in the model's tokens, and when it comes, in seconds."""

    arrival_s: float
    tokens: tuple[int, ...]
    hashes: tuple[bytes, ...]


def sampled(requests: Sequence[TraceRequest], count: int, seed: int = 1) -> list[TraceRequest]:
    """About `count` requests: conversations by chance, all of each. Of a conversation the second block is the same;
    the first is a system prompt that many have."""

    def conversation(request: TraceRequest) -> tuple[int, ...]:
        return request.block_ids[:2]

    sizes: dict[tuple[int, ...], int] = {}
    for request in requests:
        sizes[conversation(request)] = sizes.get(conversation(request), 0) + 1
    names = list(sizes)
    random.Random(seed).shuffle(names)
    taken, have = set(), 0
    for name in names:
        if have >= count:
            break
        taken.add(name)
        have += sizes[name]
    return [request for request in requests if conversation(request) in taken]


def scaled(requests: Sequence[TraceRequest], seconds: float) -> list[ScaledPrompt]:
    """The requests' prompts at a thirty-second of their lengths, spread over so many seconds."""
    first, last = requests[0].arrival_s, requests[-1].arrival_s
    pace = seconds / max(last - first, 1e-9)
    return [
        _scaled_prompt(request, number, (request.arrival_s - first) * pace)
        for number, request in enumerate(requests)
    ]


def _scaled_prompt(request: TraceRequest, number: int, arrival_s: float) -> ScaledPrompt:
    whole = min(request.prompt_tokens // BLOCK_TOKENS, len(request.block_ids))
    tokens: list[int] = []
    for block_id in request.block_ids[:whole]:
        dice = random.Random(f"block {block_id}")
        tokens += [dice.randrange(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(BLOCK)]
    # What does not fill a block is shared with nobody.
    dice = random.Random(f"rest {number}")
    rest = max(request.prompt_tokens // SCALE - len(tokens), 0 if tokens else 1)
    tokens += [dice.randrange(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(rest)]
    hashes = tuple(each.to_bytes(32, "big") for each in request.block_ids[:whole])
    return ScaledPrompt(arrival_s, tuple(tokens), hashes)


def block_bytes(model: str) -> int:
    """KV bytes of a block, in bfloat16."""
    folder = Path(resolve_model(model).path)
    shape = shape_of(model, read_config(folder / "config.json"), GivenShape())
    return BLOCK * shape.kv_bytes_per_token


def endless_share(prompts: Sequence[ScaledPrompt]) -> float:
    """The share of the prompts' tokens that one cache finds which keeps everything."""
    replayed = [ReplayedPrompt(prompt.hashes, len(prompt.tokens), BLOCK) for prompt in prompts]
    return share_of(replayed, max(1, distinct_blocks(prompts)), 0, 0, "age")


def distinct_blocks(prompts: Sequence[ScaledPrompt]) -> int:
    """How many different blocks the prompts have."""
    return len({each for prompt in prompts for each in prompt.hashes})


async def cluster_rows(model: str, path: Path, requests: int, load: float) -> list[TraceRow]:
    """The trace on a prefill and a decode worker with the same KV blocks, without and with host memory below them.

    Each worker's pool holds a sixteenth of the distinct blocks, its host tier eight times as many. The time that the
    trace is spread over is measured once, on the first cluster. Raises RuntimeError if a request fails.
    """
    chosen = sampled(load_trace(path).requests, requests)
    prompts = scaled(chosen, 1.0)
    pool = max(distinct_blocks(prompts) // POOL_PART, 2 * max(len(p.tokens) for p in prompts) // BLOCK)
    endless, seconds, rows = endless_share(prompts), 0.0, []
    for name, host in (("none", 0), ("host", HOST_TIMES * pool)):
        engine = EngineConfig(num_blocks=pool, kv_host_tier_bytes=host * block_bytes(model) or None)
        config = ClusterConfig(model=model, engine=engine)
        async with running_cluster(config, {FRONT: PATIENT}, lambda _event: None) as cluster:
            client = cluster.clients[FRONT]
            seconds_a_token = await _warmed_up(client, prompts)
            seconds = seconds or seconds_a_token * sum(len(p.tokens) for p in prompts) / load
            answers = await _replayed(client, scaled(chosen, seconds))
        hit_share = sum(a.cached_tokens for a in answers) / sum(len(p.tokens) for p in prompts)
        ttft_ms = 1e3 * mean(answer.ttft_s for answer in answers)
        rows.append(
            TraceRow(path.stem, name, pool, host, round(hit_share, 4), round(endless, 4), round(ttft_ms, 1))
        )
    return rows


async def _warmed_up(client: AsyncClient, prompts: Sequence[ScaledPrompt]) -> float:
    """Seconds that a token of a prompt of mean length takes to compute on one worker."""
    numbers, length = random.Random(-1), round(mean(len(prompt.tokens) for prompt in prompts))
    found = []
    for _ in range(WARM_UPS):
        answer = await ask(client, random_prompt(numbers, length), MAX_TOKENS)
        found.append(answer.token_s[0] / length)
    return median(found[1:])


async def _replayed(client: AsyncClient, prompts: Sequence[ScaledPrompt]) -> list[AskedAnswer]:
    """Sends every prompt at its time."""
    began_s = time.monotonic()

    async def one(prompt: ScaledPrompt) -> AskedAnswer:
        await asyncio.sleep(max(0.0, began_s + prompt.arrival_s - time.monotonic()))
        return await ask(client, prompt.tokens, MAX_TOKENS)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in prompts]
    except* SplitserveError as failed:
        raise RuntimeError(f"a request failed: {failed.exceptions[0]}") from failed
    return [task.result() for task in tasks]
