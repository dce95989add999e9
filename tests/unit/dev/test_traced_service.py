"""The recorder of files that a request enters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from dev.docs.traced_service import ROOT, Recorder

REQUEST = type("ChatRequest", (), {"__module__": "coordinator.request.chat"})()


def function(file: str, body: str, **names: object) -> Callable[..., object]:
    """A function `run(request=None)` that lies in `file` of this repository."""
    scope = dict(names)
    exec(compile(f"def run(request=None):\n    {body}", f"{ROOT}/{file}", "exec"), scope)
    run = scope["run"]
    assert callable(run)
    return run


def recorded(recorder: Recorder, act: Callable[[], object]) -> list[str]:
    before = sys.getprofile()
    recorder.begin()
    sys.setprofile(recorder)
    try:
        act()
    finally:
        sys.setprofile(before)
        recorder.end()
    return list(recorder.files)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_timers_do_not_count(recorder: Recorder) -> None:
    timer = function("worker/timer.py", "pass")
    serve = function("coordinator/serve.py", "pass")
    assert recorded(recorder, timer) == ["worker/timer.py"]
    assert recorded(recorder, lambda: (timer(), serve(), timer())) == ["coordinator/serve.py"]


def test_another_way_into_a_timers_file_counts(recorder: Recorder) -> None:
    shared = function("splitserve/shared.py", "pass")
    timer = function("worker/timer.py", "shared()", shared=shared)
    serve = function("coordinator/serve.py", "shared(request)", shared=shared)
    recorded(recorder, timer)
    assert recorded(recorder, lambda: serve(REQUEST)) == ["coordinator/serve.py", "splitserve/shared.py"]
    assert list(recorder.handed_on) == ["coordinator/serve.py", "splitserve/shared.py"]


def test_a_recording_forgets_the_one_before(recorder: Recorder) -> None:
    serve = function("coordinator/serve.py", "pass")
    recorded(recorder, lambda: None)
    assert recorded(recorder, lambda: serve(REQUEST)) == ["coordinator/serve.py"]
    assert recorded(recorder, lambda: None) == []
    assert not recorder.handed_on


def test_other_files_do_not_count(recorder: Recorder) -> None:
    recorded(recorder, lambda: None)
    assert recorded(recorder, function("tests/outside.py", "pass")) == []
    assert recorded(recorder, function("splitserve/v1/generated_pb2.py", "pass")) == []


def test_returns_do_not_count(recorder: Recorder) -> None:
    recorder.begin()
    frame: FrameType = sys._getframe()
    recorder(frame, "return", None)
    assert not recorder.files
