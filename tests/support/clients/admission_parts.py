"""Entries and workers for tests of admission."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from coordinator.admission.model_admission import ModelAdmission
from coordinator.request.state import Entry
from coordinator.workers.load import WorkerLoads
from coordinator.workers.snapshot import Model, PoolSnapshot, Worker
from splitserve.config.coordinator import AdmissionConfig
from splitserve.roles import PoolName
from splitserve.v1 import registry_pb2
from tests.support.latency import latency as latency_of

MODEL = Model("m", "m", 65536, 1000)
_NUMBERS = itertools.count(1)


def entry(prompt: int = 100, output: float = 50, **changes: Any) -> Entry:
    fields: dict[str, Any] = {
        "request_id": f"r{next(_NUMBERS)}",
        "tenant": "a",
        "weight": 1.0,
        "priority_class": "standard",
        "priority": 0,
        "prompt_tokens": prompt,
        "uncached_tokens": float(prompt),
        "expected_output": float(output),
        "max_output": int(output),
        "needs_decode": output > 1,
        "arrived_s": 0.0,
        "deadline_s": 1e6,
    }
    return Entry(**(fields | changes))


def load(**changes: Any) -> registry_pb2.WorkerLoad:
    measured = {name: changes.pop(name, usual) for name, usual in (("tokens_per_s", 10_000), ("step_ms", 10))}
    fields: dict[str, Any] = {"total_blocks": 4096, "free_blocks": 4096, "latency": latency_of(**measured)}
    return registry_pb2.WorkerLoad(**(fields | changes))


def worker(name: str, pool: PoolName, slots: int = 64, **changes: Any) -> Worker:
    """A worker that serves; `changes` are of its load, by the names of `load`, or of the worker itself."""
    names = {*registry_pb2.WorkerLoad.DESCRIPTOR.fields_by_name, "tokens_per_s", "step_ms"}
    figures = {key: changes.pop(key) for key in names & changes.keys()}
    made = Worker(
        name,
        1,
        pool,
        "a:1",
        MODEL,
        name,
        "nixl",
        16,
        slots,
        load=load(**figures),
        reported=True,
        output_open=True,
    )
    return dataclasses.replace(made, **changes)


def admission(
    workers: tuple[Worker, ...] = (worker("p0", "prefill"), worker("d0", "decode")),
    loads: WorkerLoads | None = None,
    **settings: Any,
) -> ModelAdmission:
    made = ModelAdmission(AdmissionConfig(**settings), loads or WorkerLoads.of(workers))
    made.set_workers(PoolSnapshot(workers), MODEL.name)
    return made


def sent(model: ModelAdmission, one: Entry, tokens: int) -> bool:
    """Output of a request was sent, as the request flow reports it. True: the first tokens."""
    first = model.loads.output(one, tokens)
    model.sent(one, tokens)
    return first


def decoded(model: ModelAdmission, one: Entry) -> None:
    """A request's decode worker is done with it."""
    model.loads.decoded(one)


def ended(model: ModelAdmission, one: Entry) -> None:
    """A request is over."""
    model.loads.ended(one)
    model.ended(one)


def finish(model: ModelAdmission, one: Entry) -> None:
    """A request has its only token, and is over."""
    sent(model, one, 1)
    decoded(model, one)
    ended(model, one)
