"""The request log: what a line says, that the simulator reads it, rotation, and a disk that is full or slow."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from autoscaler.simulation.traces.trace import load_trace
from coordinator.request.state import RequestEstimate, RequestState
from coordinator.telemetry import request_log
from coordinator.telemetry.record_keeper import RecordKeeper
from coordinator.telemetry.request_log import MAX_PREFIX_HASHES, RequestLog, prefix_hashes
from splitserve.config.coordinator import RecordsConfig
from splitserve.errors import ConfigError, ResourceExhaustedError
from tests.unit.coordinator.telemetry.test_record import Clock, request_of, serve

MIB = 2**20


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def dropped(log: RequestLog) -> float:
    (metric,) = log.metrics()
    return metric.samples[0].value


class States:
    """Requests that wait for admission."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __call__(self, name: str) -> RequestState:
        return RequestState.of(request_of(self._clock, name), RequestEstimate(8.0, 40.0), self._clock.at(2))


def end(log: RequestLog, state: RequestState, error: Exception | None) -> None:
    RecordKeeper(RecordsConfig(), on_ended=[log.add]).ended(state, error)


@pytest.fixture
def state_of(clock: Clock) -> States:
    return States(clock)


def test_a_line_a_request_and_no_content(tmp_path: Path, clock: Clock, state_of: States) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, MIB)
    serve(clock, RecordKeeper(RecordsConfig(), on_ended=[log.add]), "first")
    end(log, state_of("second"), ResourceExhaustedError("full", reason="QUEUE_FULL"))
    log.close()
    first, second = lines(path)
    assert first["request_id"] == "first"
    assert (first["outcome"], second["outcome"]) == ("completed", "rejected")
    assert (first["prompt_tokens"], first["cached_tokens"], first["uncached_tokens"]) == (40, 16, 24)
    assert (first["output_tokens"], first["max_output_tokens"], first["attempts"]) == (3, 8, 1)
    assert (first["prefill_worker"], first["decode_worker"], first["prefill_at"]) == ("p0", "d0", "prefill")
    assert (first["ttft_s"], first["tpot_s"], first["tenant"]) == (0.04, 0.015, "default")
    assert first["phases_s"]["prefill_compute"] == 0.02
    assert (second["prefill_at"], second["ttft_s"]) == (None, None)
    assert first["time"] > 1e9
    assert not {"prompt", "text", "token_ids", "messages"} & first.keys()
    assert dropped(log) == 0
    assert path.stat().st_mode & 0o077 == 0
    trace = load_trace(path)
    assert [one.prompt_tokens for one in trace.requests] == [first["prompt_tokens"], second["prompt_tokens"]]


def test_a_log_is_continued_and_rotated_by_size(tmp_path: Path, state_of: States) -> None:
    path = tmp_path / "requests.jsonl"
    for number in range(3):
        log = RequestLog(path, 1)
        end(log, state_of(f"r{number}"), None)
        log.close()
    assert [one["request_id"] for one in lines(path)] == ["r2"]
    assert [one["request_id"] for one in lines(tmp_path / "requests.jsonl.1")] == ["r1"]
    assert sorted(found.name for found in tmp_path.iterdir()) == ["requests.jsonl", "requests.jsonl.1"]


def test_a_full_disk_drops_whole_lines_and_counts_them(
    tmp_path: Path, state_of: States, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, MIB)
    real = os.write

    def torn(descriptor: int, text: bytes) -> int:
        real(descriptor, text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(request_log.os, "write", torn)
    end(log, state_of("lost"), None)
    log.close()
    assert path.read_bytes() == b""
    assert dropped(log) == 1


def test_a_slow_disk_never_holds_up_a_request(
    tmp_path: Path, state_of: States, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "MAX_QUEUED", 4)
    log, released = RequestLog(tmp_path / "requests.jsonl", MIB), threading.Event()
    real = os.write

    def slow(descriptor: int, text: bytes) -> int:
        released.wait(30)
        return real(descriptor, text)

    monkeypatch.setattr(request_log.os, "write", slow)
    for number in range(20):
        end(log, state_of(f"r{number}"), None)
    assert 10 <= dropped(log) < 20
    released.set()
    log.close()
    assert len(lines(tmp_path / "requests.jsonl")) + dropped(log) == 20


@pytest.mark.parametrize("name", [".", "none/requests.jsonl", "/dev/full"])
def test_what_cannot_be_written_is_said_at_the_start(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="request_log: cannot write"):
        RequestLog(tmp_path / name, MIB)


def test_hashes_are_those_of_every_512_tokens() -> None:
    names = tuple(range(100))
    assert prefix_hashes(names, 16) == [f"{number:016x}" for number in (31, 63, 95)]
    assert prefix_hashes((5, 6), 512) == [f"{5:016x}", f"{6:016x}"]
    assert prefix_hashes(names, 24) == prefix_hashes((), 0) == []
    assert len(prefix_hashes(range(9999), 512)) == MAX_PREFIX_HASHES
