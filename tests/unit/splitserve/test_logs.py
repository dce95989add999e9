"""Structured log lines: fields, request ids, levels, formats."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest

from splitserve.errors import ConfigError
from splitserve.logs import LogFormat, configure_logging, log_context, log_event, log_exception


@pytest.fixture
def stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.CaptureFixture[str]]:
    root, ours = logging.getLogger(), logging.getLogger("splitserve")
    levels = root.level, ours.level
    for variable in ("SPLITSERVE_LOG_LEVEL", "SPLITSERVE_LOG_FORMAT"):
        monkeypatch.delenv(variable, raising=False)
    yield capsys
    root.handlers.clear()
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def lines(stream: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.readouterr().err.splitlines()]


def test_an_event_is_one_json_object(stderr: pytest.CaptureFixture[str]) -> None:
    configure_logging("coordinator")
    log_event("handoff.completed", request_id="r1", bytes=12, event_of=ValueError("odd\nvalue"))
    (line,) = lines(stderr)
    assert line["event"] == "handoff.completed"
    assert (line["part"], line["level"], line["request_id"], line["bytes"]) == (
        "coordinator",
        "info",
        "r1",
        12,
    )
    assert line["event_of"] == "odd\nvalue"


@pytest.mark.parametrize("format", ["json", "text"])
def test_a_long_text_is_cut(stderr: pytest.CaptureFixture[str], format: LogFormat) -> None:
    configure_logging("coordinator", format=format)
    log_event("request.failed", error="x" * 15_000_000)
    line = stderr.readouterr().err
    assert len(line) < 3000
    assert "15000000 characters" in line


def test_fields_cannot_replace_the_lines_own_keys(stderr: pytest.CaptureFixture[str]) -> None:
    configure_logging("p0")
    log_event("x.y", part="other")
    (line,) = lines(stderr)
    assert (line["part"], line["field_part"]) == ("p0", "other")


async def test_the_request_id_follows_into_tasks(stderr: pytest.CaptureFixture[str]) -> None:
    configure_logging("c")

    async def work() -> None:
        log_event("inner")

    with log_context(request_id="r7", trace_id="4bf9"):
        await asyncio.create_task(work())
        log_event("own", request_id="other")
        with log_context(model="m"):
            log_event("beside")
        with log_context(request_id="r8", trace_id=""):
            log_event("untraced")
    log_event("outer")
    inner, own, beside, untraced, outer = lines(stderr)
    assert (inner["request_id"], inner["trace_id"]) == ("r7", "4bf9")
    assert (own["request_id"], own["trace_id"]) == ("other", "4bf9")
    assert (beside["request_id"], beside["trace_id"], beside["model"]) == ("r7", "4bf9", "m")
    assert untraced["request_id"] == "r8"
    assert "trace_id" not in untraced
    assert not {"request_id", "trace_id"} & outer.keys()


def test_exceptions_carry_their_traceback(stderr: pytest.CaptureFixture[str]) -> None:
    configure_logging("c")
    try:
        raise RuntimeError("boom")
    except RuntimeError as error:
        log_exception("rpc.internal_error", error, incident="abc")
    (line,) = lines(stderr)
    assert line["level"] == "error"
    assert "RuntimeError: boom" in str(line["traceback"])


def test_the_level_comes_from_the_environment(
    stderr: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITSERVE_LOG_LEVEL", "warning")
    configure_logging("c")
    log_event("quiet")
    log_event("loud", level=logging.WARNING)
    assert [line["event"] for line in lines(stderr)] == ["loud"]
    monkeypatch.setenv("SPLITSERVE_LOG_LEVEL", "chatty")
    with pytest.raises(ConfigError, match="chatty"):
        configure_logging("c")


def test_the_form_comes_from_the_environment(
    stderr: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITSERVE_LOG_FORMAT", "text")
    configure_logging("c")
    with log_context(request_id="r7", trace_id="4bf9"):
        log_event("request.completed")
    assert stderr.readouterr().err.rstrip().endswith("c request.completed request_id=r7 trace_id=4bf9")
    monkeypatch.setenv("SPLITSERVE_LOG_FORMAT", "json")
    configure_logging("c")
    log_event("x")
    assert [line["event"] for line in lines(stderr)] == ["x"]
    monkeypatch.setenv("SPLITSERVE_LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match="SPLITSERVE_LOG_FORMAT: 'xml' is none of auto, json, text"):
        configure_logging("c")


def test_text_for_people(stderr: pytest.CaptureFixture[str]) -> None:
    configure_logging("c", format="text")
    log_event("worker.ready", worker_id="p0", why="two words", seconds=0.123456)
    assert (
        stderr.readouterr()
        .err.rstrip()
        .endswith('c worker.ready worker_id=p0 why="two words" seconds=0.1235')
    )


def test_other_libraries_are_heard_from_warning_on(stderr: pytest.CaptureFixture[str]) -> None:
    configure_logging("c")
    logging.getLogger("grpc").info("chatter")
    logging.getLogger("somelib").warning("50%% of %s", "it")
    (line,) = lines(stderr)
    assert (line["event"], line["logger"], line["message"]) == ("library.message", "somelib", "50% of it")
