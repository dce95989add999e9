"""Adapters at the coordinator: what is registered, under which names it is known, and which workers get requests."""

from __future__ import annotations

import pytest

from coordinator.models.model_routes import ModelRoutes
from coordinator.request.inference_request import ANYONE, Caller
from coordinator.routing.prefix_router import PrefixRouter
from coordinator.routing.router import RoutingRequest
from coordinator.workers.registry import Registry
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from splitserve.generation.kv_blocks import Adapter
from splitserve.v1 import generation_pb2, registry_pb2
from tests.support.cluster.registrations import registration

PREFILL, DECODE = registry_pb2.ROLE_PREFILL, registry_pb2.ROLE_DECODE
RED, BLUE = {"red": "1" * 64}, {"blue": "2" * 64}


def with_adapters(
    request: registry_pb2.RegisterRequest, adapters: dict[str, str]
) -> registry_pb2.RegisterRequest:
    for name, fingerprint in adapters.items():
        request.model.adapters.append(generation_pb2.AdapterRef(name=name, fingerprint=fingerprint))
    return request


def registry_of(pools: dict[str, dict[str, str]]) -> Registry:
    """Workers by id, `p0` or `d0`, with their adapters; all of them connected."""
    registry = Registry(5.0)
    agents = []
    for name, adapters in pools.items():
        pool = PREFILL if name.startswith("p") else DECODE
        worker = registry.register(with_adapters(registration(name, pool), adapters), 0.0)
        if pool == DECODE:
            agents.append(worker.agent_id)
            registry.set_output_open(worker.key, True)
    for name in sorted(pools):
        agent_ids = agents if name.startswith("p") else []
        report = registry_pb2.ReportRequest(worker_id=name, epoch=1, connected_agent_ids=agent_ids)
        registry.report(report, 0.0)
    registry.report(registry_pb2.ReportRequest(worker_id="p0", epoch=1, connected_agent_ids=agents), 100.0)
    return registry


@pytest.mark.parametrize(
    ("adapters", "field"),
    [
        ({"": "1" * 64}, "model.adapters.name"),
        ({"a b": "1" * 64}, "model.adapters.name"),
        ({"a" * 129: "1" * 64}, "model.adapters.name"),
        ({"words": "1" * 64}, "model.adapters.name"),
        ({"red": "1" * 63}, "model.adapters.fingerprint"),
        ({"red": "g" * 64}, "model.adapters.fingerprint"),
        ({f"a{number}": "1" * 64 for number in range(129)}, "model.adapters"),
    ],
)
def test_bad_adapters_are_refused(adapters: dict[str, str], field: str) -> None:
    registry = Registry(5.0)
    with pytest.raises(InvalidArgumentError) as caught:
        registry.register(with_adapters(registration("p0", PREFILL), adapters), 0.0)
    assert caught.value.field == field
    assert not registry.known_models()


def test_a_name_twice_is_refused() -> None:
    request = with_adapters(with_adapters(registration("p0", PREFILL), RED), RED)
    with pytest.raises(InvalidArgumentError, match="another one each"):
        Registry(5.0).register(request, 0.0)


def test_adapters_are_known_as_models_of_their_base() -> None:
    registry = registry_of({"p0": RED | BLUE, "d0": RED})
    known = registry.known_models()
    assert sorted(known) == ["blue", "red", "words"]
    red, base = known["red"], known["words"]
    assert (red.adapter, red.base, red.base_name) == (Adapter("red", "1" * 64), "words", "words")
    assert (base.adapter, base.base, base.base_name) == (None, "", "words")
    assert (red.tokenizer_source, red.context_tokens) == (base.tokenizer_source, base.context_tokens)
    assert registry.snapshot().ready_models() == {"words", "red"}
    assert list(registry.snapshot().models()) == ["words"], "adapters bring no workers of their own"


def test_names_stay_known_and_content_follows_the_last_registration() -> None:
    registry = registry_of({"p0": RED})
    registry.drop(("p0", 1), "gone")
    assert registry.known_models()["red"].adapter == Adapter("red", "1" * 64)
    registry.register(with_adapters(registration("p1", PREFILL), {"red": "3" * 64}), 1.0)
    assert registry.known_models()["red"].adapter == Adapter("red", "3" * 64)


def test_other_content_under_a_name_is_refused() -> None:
    registry = registry_of({"p0": RED, "d0": RED})
    other = with_adapters(registration("d1", DECODE), {"red": "3" * 64})
    with pytest.raises(FailedPreconditionError, match="'red' is an adapter with other files on") as caught:
        registry.register(other, 0.0)
    assert (caught.value.reason, caught.value.field) == ("ADAPTER_MISMATCH", "model.adapters")
    assert registry.get(("d1", 1)) is None


@pytest.mark.parametrize(
    ("model", "adapters"), [("others", RED), ("red", {}), ("others", {"words": "1" * 64})]
)
def test_a_name_of_two_models_is_refused(model: str, adapters: dict[str, str]) -> None:
    registry = registry_of({"p0": RED})
    with pytest.raises(FailedPreconditionError) as caught:
        registry.register(with_adapters(registration("p1", PREFILL, model=model), adapters), 0.0)
    assert (caught.value.reason, caught.value.field) == ("MODEL_MISMATCH", "model.adapters")


def test_requests_go_to_pairs_that_have_the_adapter() -> None:
    registry = registry_of({"d0": {}, "d1": RED, "p0": RED, "p1": BLUE})
    router = PrefixRouter()

    def pairs(model: str) -> set[tuple[str, str]]:
        found = set()
        for turn in range(16):
            request = RoutingRequest(model, prompt_tokens=10, turn=turn)
            pair = router.choose_pair(registry.snapshot(), registry.loads, request)
            if pair is not None and pair.decode is not None:
                found.add((pair.prefill.worker_id, pair.decode.worker_id))
        return found

    assert pairs("red") == {("p0", "d1")}
    assert pairs("blue") == set()
    assert {prefill for prefill, _ in pairs("words")} == {"p0", "p1"}
    assert {decode for _, decode in pairs("words")} == {"d0", "d1"}


def test_an_empty_name_is_the_base_model_s() -> None:
    routes = ModelRoutes(registry_of({"p0": RED, "d0": RED}))
    found = routes.find("", "key", ANYONE)
    assert found is not None
    assert found.model.name == "words"


def test_tenants_use_and_see_only_what_they_may() -> None:
    routes = ModelRoutes(registry_of({"p0": RED | BLUE, "d0": RED | BLUE}))
    caller = Caller("alice", models=("red",))
    assert [one.name for one in routes.nameable(caller)] == ["red"]
    found = routes.find("", "key", caller)
    assert found is not None
    assert found.model.name == "red", "its only model needs no name"
    messages = []
    for name in ("blue", "words", "nonsense"):
        with pytest.raises(NotFoundError) as caught:
            routes.find(name, "key", caller)
        assert caught.value.reason == "MODEL_NOT_FOUND"
        messages.append(caught.value.message.replace(name, "NAME"))
    assert len(set(messages)) == 1
