"""While a step is in progress no request joins and no block is allocated; everything else may be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from engine.core.engine_core import EngineCore
from tests.support.engine.engine_rig import PROMPT, Rig, request

pytestmark = pytest.mark.timeout(60)

MUST_WAIT: dict[str, Callable[[EngineCore], object]] = {
    "add_request": lambda core: core.add_request(request("new")),
    "reserve": lambda core: core.reserve(request("new"), 9),
    "admit": lambda core: core.admit(7, 1),
    "begin_step": lambda core: core.begin_step(),
    "collect": lambda core: core.collect(),
    "step": lambda core: core.step(),
}
MAY_BE_CALLED: dict[str, Callable[[EngineCore], object]] = {
    "abort": lambda core: core.abort("running"),
    "release_held": lambda core: core.release_held("held"),
    "release_writer": lambda core: core.release_writer(8),
    "keep_prompt_room": lambda core: core.keep_prompt_room(True),
    "take_result": lambda core: core.take_result(),
    "poll_while_computing": lambda core: core.poll_while_computing(lambda: None),
}
ENDS = {"finish_step", "close"}
READS: dict[str, Callable[[EngineCore], object]] = {
    "cached_tokens": lambda core: core.cached_tokens(request("new")),
    "has_work": lambda core: core.has_work(),
    "next_deadline": lambda core: core.next_deadline(),
    "load": lambda core: core.load(),
}


def under_way() -> Rig:
    """A step is in progress; a prompt's blocks are held, one reservation is live, another one's writer is."""
    rig = Rig(overlaps=True, max_step_tokens=64)
    rig.core.add_request(request("held", prefill_only=True))
    rig.run()
    rig.results.clear()
    assert rig.core.reserve(request("awaited"), 7) is not None
    assert rig.core.reserve(request("aborted"), 8) is not None
    rig.core.abort("aborted")
    rig.core.add_request(request("running"))
    rig.core.begin_step()
    return rig


def test_every_method_is_listed_as_guarded_or_not() -> None:
    methods = {
        name for name, _ in inspect.getmembers(EngineCore, inspect.isfunction) if not name.startswith("_")
    }
    assert methods == MUST_WAIT.keys() | MAY_BE_CALLED.keys() | READS.keys() | ENDS


@pytest.mark.parametrize("name", MUST_WAIT)
def test_methods_that_allocate_blocks_are_guarded(name: str) -> None:
    rig = under_way()
    before = rig.core.pool.counts()
    with pytest.raises(AssertionError, match="a step is under way"):
        MUST_WAIT[name](rig.core)
    assert rig.core.pool.counts() == before
    rig.core.finish_step()
    result = rig.core.take_result()
    assert result is not None
    assert [output.request_id for output in result.outputs] == ["running"]


@pytest.mark.parametrize("name", [*MAY_BE_CALLED, *READS])
def test_all_other_methods_may_be_called(name: str) -> None:
    rig = under_way()
    free = rig.core.pool.free
    (MAY_BE_CALLED | READS)[name](rig.core)
    assert rig.core.pool.free >= free
    rig.core.finish_step()
    rig.core.take_result()
    for request_id in ("running", "held", "awaited"):
        rig.core.abort(request_id)
    rig.core.release_held("held")
    rig.core.release_writer(7)
    rig.core.release_writer(8)
    assert rig.core.pool.free == rig.core.pool.total


def test_no_step_can_end_that_has_not_begun() -> None:
    rig = Rig()
    rig.core.add_request(request("r", PROMPT))
    with pytest.raises(AssertionError):
        rig.core.finish_step()
