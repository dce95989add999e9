"""Two versions of a model in one cluster, with scripted workers: canary, rollback, sessions, several coordinators."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.models.model_routes import ModelRoute
from coordinator.service import running_coordinator
from launcher.cli.main import main
from splitserve.client.routes_client import RoutesClient, RouteState
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import FailedPreconditionError, NotFoundError, UnauthenticatedError, UnavailableError
from splitserve.rpc.credentials import new_token
from splitserve.v1 import inference_pb2
from tests.support.cluster.fake_cluster import (
    Collected,
    FakeCluster,
    ask,
    expected,
    fake_cluster,
    finish,
    read,
)
from tests.support.engine.word_tokenizer import load_word_tokenizer
from tests.support.journal import settled

pytestmark = pytest.mark.timeout(60)

V1, V2 = "words-v1", "words-v2"
CANARY = {V1: 95.0, V2: 5.0}


@asynccontextmanager
async def two_versions(**config: Any) -> AsyncIterator[FakeCluster]:
    """p0 and d0 serve version 1, p1 and d1 version 2."""
    settings = {"model_routes": {"words": CANARY}} | config
    async with fake_cluster(prefill=0, decode=0, **settings) as cluster:
        for number, model in enumerate((V1, V2)):
            await cluster.add_decode(f"d{number}", model=model)
            await cluster.add_prefill(f"p{number}", model=model)
        await settled(lambda: cluster.coordinator.routes.ready_models == {V1, V2})
        yield cluster


def served(answer: Collected) -> str:
    assert answer.done is not None
    assert answer.done.model == "words"
    return answer.done.served_by.model


async def test_a_canary_gets_its_share_and_sessions_stay() -> None:
    async with two_versions() as cluster:
        sessions = [f"s{number}" for number in range(300)]
        answers = [await cluster.answer(ask(2, model="words", session_id=session)) for session in sessions]
        models = [served(answer) for answer in answers]
        route = ModelRoute("words", CANARY)
        assert models == [route.choose(session, {V1, V2}) for session in sessions]
        assert 5 <= Counter(models)[V2] <= 27
        again = [await cluster.answer(ask(2, model="words", session_id=session)) for session in sessions[:40]]
        assert [served(answer) for answer in again] == models[:40]
        stats = cluster.coordinator.stats.models()
        assert {name: model.requests for name, model in stats.items()} == {
            model: count + Counter(models[:40])[model] for model, count in Counter(models).items()
        }


async def test_a_rollback_is_instant_and_nothing_fails() -> None:
    async with two_versions() as cluster:
        client = RoutesClient([cluster.address])
        await client.set("words", {V1: 0, V2: 1})
        cluster.decodes[1].token_gate.close()
        calls = [(cluster.call(ask(6, model="words")), Collected()) for _ in range(20)]
        for call, answer in calls:
            await read(call, answer, 1)
        assert await client.previous("words") == CANARY
        assert await client.set("words", {V1: 1, V2: 0}) == {cluster.address: []}
        after = await asyncio.gather(*(cluster.answer(ask(6, model="words")) for _ in range(20)))
        assert {served(answer) for answer in after} == {V1}
        cluster.decodes[1].token_gate.open()
        finished = [await finish(call, answer) for call, answer in calls]
        assert {served(answer) for answer in finished} == {V2}
        assert all(answer.token_ids == expected(6) for answer in (*after, *finished))


async def test_a_resume_stays_on_its_version() -> None:
    async with two_versions(model_routes={"words": {V1: 1, V2: 0}}) as cluster:
        spare = await cluster.add_decode("d2", model=V1)

        def both_reached() -> bool:
            snapshot = cluster.coordinator.registry.snapshot()
            decodes, (prefill,) = snapshot.accepting(V1, "decode"), snapshot.accepting(V1, "prefill")
            return len(decodes) == 2 and all(prefill.reaches(decode) for decode in decodes)

        await settled(both_reached)
        for decode in (cluster.decodes[0], spare):
            decode.pause_at = 2
        call, answer = cluster.call(ask(6, model="words", session_id="s")), Collected()
        await read(call, answer, 2)
        await RoutesClient([cluster.address]).set("words", {V2: 1})
        victim = next(d for d in (cluster.decodes[0], spare) if d.live)
        other = spare if victim is cluster.decodes[0] else cluster.decodes[0]
        other.pause_at = None
        victim.break_streams()
        await finish(call, answer)
        assert answer.token_ids == expected(6)
        assert served(answer) == V1
        victim.token_gate.open()


async def test_a_version_whose_workers_leave_gets_no_share() -> None:
    async with two_versions(model_routes={"words": {V1: 1, V2: 10**6}}) as cluster:
        assert served(await cluster.answer(ask(2, model="words"))) == V2
        cluster.decodes[1].drain()
        await settled(lambda: cluster.coordinator.routes.ready_models == {V1})
        assert served(await cluster.answer(ask(2, model="words"))) == V1


async def test_what_can_be_named() -> None:
    async with two_versions() as cluster:
        models = (await cluster.client.ListModels(inference_pb2.ListModelsRequest())).models
        assert [model.name for model in models] == ["words", V1, V2]
        assert [(v.name, v.weight, v.ready) for v in models[0].versions] == [(V1, 95, True), (V2, 5, True)]
        assert models[0].ready
        pinned = await cluster.answer(ask(2, model=V2))
        assert pinned.done is not None
        assert (pinned.done.model, pinned.done.served_by.model) == (V2, V2)
        assert served(await cluster.answer(ask(2))) in (V1, V2), "the only public name needs no naming"
    async with two_versions(direct_model_names="hide") as cluster:
        models = (await cluster.client.ListModels(inference_pb2.ListModelsRequest())).models
        assert [model.name for model in models] == ["words"]
        assert isinstance(await cluster.error(ask(model=V1)), NotFoundError)


async def test_a_route_without_workers_is_unavailable_not_unknown() -> None:
    async with two_versions(model_routes={"later": {"words-v9": 1}}, no_worker_wait_s=0.05) as cluster:
        error = await cluster.error(ask(model="later"))
        assert isinstance(error, UnavailableError)
        assert (error.reason, error.retry_after_s) == ("NO_WORKER", 1.0)


async def test_turned_away_requests_count_for_a_served_model() -> None:
    async with two_versions(max_running_requests=1) as cluster:
        await cluster.answer(ask(2, model=V1))
        cluster.decodes[0].token_gate.close()
        call, answer = cluster.call(ask(6, model=V1)), Collected()
        await read(call, answer, 1)
        await cluster.error(ask(model="words"))
        assert sum(cluster.coordinator.stats.of(V1).outcomes.values()) == 2
        cluster.decodes[0].token_gate.open()
        await finish(call, answer)


async def test_the_command_line_sets_several_coordinators(capsys: pytest.CaptureFixture[str]) -> None:
    settings = CoordinatorConfig(grpc_port=0, http_port=None, model_routes={"words": CANARY})
    async with two_versions() as one, running_coordinator(settings, load=load_word_tokenizer) as two:
        there = f"127.0.0.1:{two.port}"
        targets = ["--target", one.address, "--target", there]

        async def run(*arguments: str) -> tuple[int, str]:
            code = await asyncio.to_thread(main, ["routes", *arguments])
            return code, capsys.readouterr().out

        code, shown = await run("show", *targets)
        assert code == 0
        assert shown.count(f"{V1}  weight 95, 95.0% of new requests") == 2
        assert shown.count("no ready workers") == 2
        with pytest.raises(FailedPreconditionError):
            await RoutesClient([one.address]).previous("words")
        assert (await run("rollback", "words", *targets))[0] == 1
        code, _ = await run("set", "words", f"{V1}=50", f"{V2}=50", "new=1", *targets)
        assert code == 0
        assert one.coordinator.routes.in_force == two.routes.in_force
        code, shown = await run("show", "--json", *targets)
        state = json.loads(shown)[one.address][0]
        assert (state["weights"], state["previous"]) == ({V1: 50, V2: 50, "new": 1}, CANARY)
        assert state["shares"] == {V1: 0.5, V2: 0.5, "new": 0.0}
        assert (await run("rollback", "words", *targets))[0] == 0
        for routes in (one.coordinator.routes, two.routes):
            assert [route.weights for route in routes.in_force] == [CANARY]
        assert (await run("set", "words", f"{V1}=x", *targets))[0] == 2
        assert (await run("remove", "words", *targets))[0] == 0
        assert one.coordinator.routes.in_force == []
        code, shown = await run("show", "--target", one.address, "--target", "127.0.0.1:1")
        assert (code, "no routes" in shown) == (1, True)
        found = (await RoutesClient([one.address]).routes())[one.address]
        assert isinstance(found, list)
        assert not any(isinstance(state, RouteState) for state in found)


async def test_with_a_cluster_token_strangers_change_nothing(tmp_path: Path) -> None:
    token = new_token()
    secret = tmp_path / "token"
    secret.write_text(token)
    settings = CoordinatorConfig(
        grpc_port=0, http_port=None, cluster_token_file=secret, model_routes={"words": CANARY}
    )
    async with running_coordinator(settings, load=load_word_tokenizer) as one:
        address = f"127.0.0.1:{one.port}"
        for stranger in (RoutesClient([address]), RoutesClient([address], token="x" * 32)):
            assert isinstance((await stranger.set("words", {V2: 1}))[address], UnauthenticatedError)
            assert isinstance((await stranger.routes())[address], UnauthenticatedError)
        assert [route.weights for route in one.routes.in_force] == [CANARY]
        await RoutesClient([address], token=token).set("words", {V2: 1})
        assert [route.weights for route in one.routes.in_force] == [{V2: 1.0}]
