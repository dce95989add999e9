"""Whether a platform's pattern runs the workers that a policy wants."""

from __future__ import annotations

import pytest

from autoscaler.actuators.actuator import ActualReplica, where_they_lean
from autoscaler.actuators.docker_template import worker_id
from autoscaler.actuators.worker_kind import check_kind, runs_neutral
from splitserve.errors import FailedPreconditionError

NEUTRAL = ("worker", "--leaning", "decode")


@pytest.mark.parametrize(
    ("words", "neutral"),
    [
        (NEUTRAL, True),
        (("splitserve", "prefill-worker", "--model", "worker"), False),
        (("decode-worker",), False),
        (("sh", "-c", "sleep 1"), None),
        ((), None),
    ],
)
def test_the_command_says_it(words: tuple[str, ...], neutral: bool | None) -> None:
    assert runs_neutral(words) is neutral


@pytest.mark.parametrize(("words", "neutral"), [(NEUTRAL, False), (("prefill-worker",), True)])
def test_the_other_kind_is_refused(words: tuple[str, ...], neutral: bool) -> None:
    with pytest.raises(FailedPreconditionError, match="the pods of x") as refused:
        check_kind("the pods of x", words, neutral)
    assert (refused.value.reason, refused.value.field) == ("WORKER_KIND", "workers")
    check_kind("the pods of x", words, not neutral)
    check_kind("the pods of x", (), neutral)


def test_a_container_s_worker_is_named_as_its_entry_point_names_it() -> None:
    assert worker_id({"Config": {"Hostname": "3f2a", "Cmd": list(NEUTRAL)}}, "decode") == "worker-3f2a"
    assert worker_id({"Config": {"Hostname": "3f2a", "Cmd": ["decode-worker"]}}, "decode") == "decode-3f2a"


def test_replicas_count_where_they_lean() -> None:
    there = [ActualReplica(name, "prefill", False, 0.0) for name in ("a", "b")]
    assert [one.pool for one in where_they_lean(there, {"b": "decode", "gone": "prefill"})] == [
        "prefill",
        "decode",
    ]
