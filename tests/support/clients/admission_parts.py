"""Entries and workers for tests of admission."""

from __future__ import annotations

import itertools
from typing import Any

from coordinator.admission.entry import Entry
from coordinator.admission.model_admission import ModelAdmission
from coordinator.workers.catalog import Model
from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.snapshot import PoolName, PoolSnapshot, Worker
from splitserve.config.coordinator import AdmissionConfig
from splitserve.v1 import registry_pb2

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
    fields: dict[str, Any] = {
        "total_blocks": 4096,
        "free_blocks": 4096,
        "prefill_tokens_per_second": 10_000,
        "decode_step_ms": 10,
    }
    return registry_pb2.WorkerLoad(**(fields | changes))


def worker(name: str, pool: PoolName, slots: int = 64, **changes: Any) -> Worker:
    return Worker(
        name,
        1,
        pool,
        "a:1",
        MODEL,
        name,
        "memory",
        16,
        slots,
        load=load(**changes),
        reported=True,
        output_open=True,
    )


def admission(
    workers: tuple[Worker, ...] = (worker("p0", "prefill"), worker("d0", "decode")),
    loads: LoadLedger | None = None,
    **settings: Any,
) -> ModelAdmission:
    made = ModelAdmission(AdmissionConfig(**settings), loads or LoadLedger.of(workers))
    made.set_workers(PoolSnapshot(workers), MODEL.name)
    return made


def finish(model: ModelAdmission, one: Entry, now: float) -> None:
    """A request has its only token, and is over."""
    model.sent(one, 1, now)
    model.decoded(one)
    model.ended(one)
