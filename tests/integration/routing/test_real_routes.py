"""A model route over two versions with real weights: every answer is that of the version that served it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from coordinator.models.model_routes import ModelRoute
from splitserve.rpc.channel import make_channel
from splitserve.v1 import generation_pb2, inference_pb2
from splitserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.cluster.fake_cluster import Collected, collect
from tests.support.cluster.forked import fork_server
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import tokens
from tests.support.engine.reference import Reference
from tests.support.engine.tiny_models import make_tiny_model
from tests.support.waiting import PATIENCE_S

ROUTE, V1, V2 = "tiny", "tiny-v1", "tiny-v2"
FAMILIES = {V1: "llama", V2: "qwen2"}
CANARY = {V1: 75.0, V2: 25.0}
SESSIONS = [f"s{number}" for number in range(40)]
PROMPTS = [tokens(length, length) for length in (5, 16, 33, 70)]
MAX_TOKENS = 12

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Weights by version."""
    fork_server("torch")  # imports meanwhile
    folder = tmp_path_factory.mktemp("models")
    return {name: str(make_tiny_model(family, folder)) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> dict[str, list[list[int]]]:
    """`transformers`' answer to each prompt, by version."""
    made = {}
    for name, folder in folders.items():
        reference = Reference(folder)
        made[name] = [reference.greedy(prompt, MAX_TOKENS) for prompt in PROMPTS]
    assert all(one != other for one, other in zip(made[V1], made[V2], strict=True))
    return made


@pytest.fixture(scope="module")
async def cluster(
    folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """prefill-0 and decode-0 serve version 1, prefill-1 and decode-1 version 2."""
    logs: Path = tmp_path_factory.mktemp("logs")
    weights = ",".join(f"{model}:{weight}" for model, weight in CANARY.items())
    made = Cluster(
        logs,
        model=folders[V1],
        engine="torch",
        worker_options=["--dtype", "float32", "--num-blocks", "256", "--served-model-name", V1],
        coordinator_options=["--model-route", f"{ROUTE}={weights}"],
    )
    async with running(made):
        for pool in ("prefill", "decode"):
            made.add_worker(pool, f"{pool}-1", "--model", folders[V2], "--served-model-name", V2)
        async with made.client() as client:
            for model in FAMILIES:
                await client.wait_ready(model=model)
        yield made
        await made.assert_no_leaks()


@pytest.fixture
async def stub(cluster: Cluster) -> AsyncIterator[InferenceServiceStub]:
    async with make_channel(cluster.target) as channel:
        yield InferenceServiceStub(channel)


def ask(
    prompt: Sequence[int], session: str = "", model: str = ROUTE, **stop: int
) -> inference_pb2.GenerateRequest:
    """Greedy; up to `MAX_TOKENS` unless told."""
    return inference_pb2.GenerateRequest(
        model=model,
        token_ids=generation_pb2.TokenIds(ids=prompt),
        session_id=session,
        sampling=generation_pb2.SamplingParams(temperature=0.0),
        stop=generation_pb2.StopParams(**({"max_tokens": MAX_TOKENS} | stop)),
    )


def served(answer: Collected) -> str:
    assert answer.done is not None
    return answer.done.served_by.model


async def answers(stub: InferenceServiceStub, sessions: Sequence[str]) -> list[Collected]:
    """One for each session, all at once, the prompts in turn."""
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(sessions))]
    calls = [
        stub.Generate(ask(prompt, session), timeout=PATIENCE_S)
        for prompt, session in zip(prompts, sessions, strict=True)
    ]
    return list(await asyncio.gather(*(collect(call) for call in calls)))


def assert_right(answers: Sequence[Collected], expected: dict[str, list[list[int]]]) -> None:
    """Every answer is that of the weights that are said to have made it, and of the workers that hold them."""
    for number, answer in enumerate(answers):
        model = served(answer)
        assert answer.done is not None
        assert answer.done.model == ROUTE
        assert answer.token_ids == expected[model][number % len(PROMPTS)]
        worker = "0" if model == V1 else "1"
        assert answer.done.served_by.prefill_worker == f"prefill-{worker}"
        assert answer.done.served_by.decode_worker == f"decode-{worker}"
        assert answer.done.served_by.transport in ("nixl", "")  # nothing travels where decode has all of it


@pytest.mark.slow
async def test_a_canary_gets_its_share_and_answers_with_its_own_weights(
    stub: InferenceServiceStub, expected: dict[str, list[list[int]]]
) -> None:
    seen = await answers(stub, SESSIONS)
    assert_right(seen, expected)
    route = ModelRoute(ROUTE, CANARY)
    assert [served(answer) for answer in seen] == [route.choose(session, {V1, V2}) for session in SESSIONS]
    assert 4 <= Counter(map(served, seen))[V2] <= 16
    assert "nixl" in {answer.done.served_by.transport for answer in seen if answer.done}
    for model in (V1, V2):
        pinned = await collect(stub.Generate(ask(PROMPTS[0], "s0", model), timeout=PATIENCE_S))
        assert pinned.token_ids == expected[model][0]
