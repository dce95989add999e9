"""Models whose workers are started on demand: what a plan tells a coordinator, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.models.model_routes import ModelRoutes
from coordinator.request.inference_request import ANYONE
from coordinator.workers.registry import Registry
from coordinator.workers.rotation import MAX_ON_DEMAND, NO_PLAN, RotationPlan, checked_plan
from splitserve.errors import InvalidArgumentError, NotFoundError
from splitserve.generation.kv_blocks import Adapter
from splitserve.v1 import generation_pb2, registry_pb2, scaling_pb2
from tests.support.cluster.registrations import registration


def served(name: str = "m", **changes: Any) -> registry_pb2.ServedModel:
    fields = {"tokenizer_source": "words", "context_tokens": 512, "vocabulary_size": 100} | changes
    return registry_pb2.ServedModel(name=name, **fields)


def plan(now: float, *models: registry_pb2.ServedModel, before: RotationPlan = NO_PLAN) -> RotationPlan:
    return checked_plan(scaling_pb2.ApplyPlanRequest(on_demand=models), now, before)


def test_a_coordinator_that_never_had_a_worker_learns_the_model_and_counts_it_as_ready() -> None:
    registry = Registry(5.0)
    routes = ModelRoutes(registry)
    assert not routes.ready_models
    version = registry.version
    registry.apply_plan(plan(0.0, served()))
    assert registry.version > version
    (known,) = registry.known_models().values()
    assert (known.name, known.tokenizer_source, known.context_tokens) == ("m", "words", 512)
    assert known.block_size_tokens == 0
    assert routes.ready_models == {"m"}
    found = routes.find("m", "", ANYONE)
    assert found is not None
    assert found.model == known
    version = registry.version
    registry.apply_plan(plan(1.0, served(), before=registry.plan))
    assert registry.version == version, "the same again wakes nobody"


def test_it_ends_with_the_plan_and_the_model_stays_known() -> None:
    registry = Registry(5.0)
    routes = ModelRoutes(registry)
    registry.apply_plan(plan(0.0, served()))
    registry.expire(30.0)
    assert registry.plan.on_demand == {}
    assert not routes.ready_models
    assert "m" in registry.known_models()


def adapters(**names: str) -> list[generation_pb2.AdapterRef]:
    """By name, the first digit of the fingerprint."""
    return [generation_pb2.AdapterRef(name=name, fingerprint=digit * 64) for name, digit in names.items()]


def test_it_learns_the_adapters_too() -> None:
    registry = Registry(5.0)
    routes = ModelRoutes(registry)
    registry.apply_plan(plan(0.0, served()))
    registry.apply_plan(plan(0.0, served(adapters=adapters(red="1", blue="2")), before=registry.plan))
    known = registry.known_models()
    assert (known["red"].base, known["red"].adapter, known["red"].context_tokens) == (
        "m",
        Adapter("red", "1" * 64),
        512,
    )
    assert routes.ready_models == {"m", "red", "blue"}
    with pytest.raises(NotFoundError) as unknown:
        routes.find("green", "", ANYONE)
    assert unknown.value.reason == "MODEL_NOT_FOUND", "nobody has ever had it"
    version = registry.version
    registry.apply_plan(plan(1.0, served(adapters=adapters(red="1", blue="2")), before=registry.plan))
    assert registry.version == version, "the same again wakes nobody"


def test_what_a_name_means_here_is_not_changed_by_a_plan() -> None:
    registry = Registry(5.0)
    registry.apply_plan(plan(0.0, served("a", adapters=adapters(red="1"))))
    others = served("b", adapters=adapters(red="2", a="3")), served("red", adapters=adapters(green="4"))
    registry.apply_plan(plan(0.0, *others, before=registry.plan))
    known = registry.known_models()
    assert known["red"].adapter == Adapter("red", "1" * 64)
    assert (known["a"].adapter, known["b"].adapter) == (None, None)
    assert "green" not in known
    worker = registration("p0", registry_pb2.ROLE_PREFILL)
    worker.model.name = "a"
    worker.model.adapters.extend(adapters(red="5"))
    registry.register(worker, 0.0)
    assert registry.known_models()["red"].adapter == Adapter("red", "5" * 64), "but by a worker that has it"


def test_plans_of_several_autoscalers_keep_each_others_models() -> None:
    first = plan(0.0, served("a"))
    second = plan(20.0, served("b"), before=first)
    assert set(second.on_demand) == {"a", "b"}
    third = plan(31.0, served("b"), before=second)
    assert set(third.on_demand) == {"b"}, "a's autoscaler is gone"


@pytest.mark.parametrize(
    ("models", "field"),
    [
        ([served("")], "on_demand.name"),
        ([served(tokenizer_source="")], "on_demand.tokenizer_source"),
        ([served(context_tokens=0)], "on_demand.context_tokens"),
        ([served(vocabulary_size=2**25)], "on_demand.vocabulary_size"),
        ([served(adapters=adapters(red="x"))], "on_demand.adapters.fingerprint"),
        ([served(f"m{n}") for n in range(MAX_ON_DEMAND + 1)], "on_demand"),
    ],
)
def test_every_field_has_its_bound(models: list[registry_pb2.ServedModel], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        plan(0.0, *models)
    assert caught.value.field == field
