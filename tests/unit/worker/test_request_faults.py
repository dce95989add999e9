"""Whatever one request raises fails that request: a fault at every point where its handling passes, in one of several.

Each point is a function that is called for single requests. For a victim it raises, before or after it has done its
work. The engines must go on, the others' tokens be right, the victims fail or end, and nothing be left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.kv_consumer import KvConsumer
from decode_worker.requests import Granted, LiveRequest
from engine.core.engine_core import EngineCore
from engine.core.output_processor import PendingResult
from engine.core.scheduler import KVCacheManager
from engine.core.sequence import OutputText
from engine.core.sequence import Sequence as EngineSequence
from engine.runner.simulated_runner import VOCABULARY_SIZE, SimulatedRunner
from kv_transfer.handoff.checksums import HandoffVerifier, KvMemory
from kv_transfer.handoff.messages import BadNotification, decode
from kv_transfer.handoff.pusher import KvPusher
from kv_transfer.handoff.reservation_table import ReservationTable
from prefill_worker.kv_producer import Failed, KvProducer
from splitserve.errors import (
    BrokenInvariantError,
    DeadlineExceededError,
    InvalidArgumentError,
    SplitserveError,
)
from tests.support.engine.connector_pair import COORDINATOR, MAX_TOKENS, ConnectorPair

pytestmark = pytest.mark.timeout(60)

VICTIM = "victim"
When = Literal["before", "after"]


class Panic(BaseException):
    """As a panic in a library written in Rust arrives."""


KINDS: dict[str, Callable[[], BaseException]] = {
    "error": lambda: RuntimeError("a bug in a library"),
    "refusal": lambda: InvalidArgumentError("no", reason="REFUSED"),
    "panic": lambda: Panic("unreachable code"),
}


class Plan:
    """Which call raises what. `scope` is the request that an outer function is at work for."""

    def __init__(self, make: Callable[[], BaseException], when: When, number: int) -> None:
        self.make, self.when, self.left = make, when, number
        self.scope = ""
        self.fired = 0

    def due(self, who: str) -> bool:
        if VICTIM not in who:
            return False
        self.left -= 1
        if self.left == 0:
            self.fired += 1
            return True
        return False


@dataclass(frozen=True)
class Point:
    """A function, and whose call of it is for whom: by its arguments, or by what an outer function was called for."""

    owner: type
    name: str
    who: Callable[..., str] | None = None
    scopes: tuple[tuple[type, str, Callable[..., str]], ...] = ()
    kinds: tuple[str, ...] = ("error", "refusal", "panic")
    whens: tuple[When, ...] = ("before", "after")

    def __str__(self) -> str:
        within = "".join(f" in {name}" for _, name, _ in self.scopes)
        return f"{self.owner.__name__}.{self.name}{within}"

    def patch(self, monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
        for owner, name, who in self.scopes:
            _wrap_scope(monkeypatch, owner, name, who, plan)
        inner = getattr(self.owner, self.name)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            due = plan.due(self.who(*args, **kwargs) if self.who else plan.scope)
            if due and plan.when == "before":
                raise plan.make()
            result = inner(*args, **kwargs)
            if due:
                raise plan.make()
            return result

        monkeypatch.setattr(self.owner, self.name, faulty)


def _wrap_scope(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, who: Callable[..., str], plan: Plan
) -> None:
    inner = getattr(owner, name)

    def scoped(*args: Any, **kwargs: Any) -> Any:
        before, plan.scope = plan.scope, who(*args, **kwargs)
        try:
            return inner(*args, **kwargs)
        finally:
            plan.scope = before

    monkeypatch.setattr(owner, name, scoped)


def _of_request(_self: object, request: Any, *_: object) -> str:
    return str(request.request_id)


def _of_sequence(_self: object, sequence: Any, *_: object, **__: object) -> str:
    return str(sequence.request_id)


def _own(self: Any, *_: object) -> str:
    return str(self.request_id)


def _engine_id(self: LiveRequest, *_: object) -> str:
    return self.engine_id


def _first(_self: object, request_id: str, *_: object, **__: object) -> str:
    return request_id


def _notified(self: ReservationTable, _agent_id: str, message: bytes, _now: float) -> str:
    notice = decode(message)
    assert not isinstance(notice, BadNotification)
    entry = self._open.get(notice.reservation)
    return "" if entry is None else entry.request_id


ADMITTING = ((KvConsumer, "_admit", lambda _self, _core, verdict, _now: verdict.request_id),)
OPENING = ((KvConsumer, "_open", lambda _self, entry, *_: entry.request.request_id),)
PUSHING = ((KvPusher, "on_progress", _first),)
TEXT = ((PendingResult, "add_text", _of_sequence),)
NOTIFYING = ((ReservationTable, "on_notification", _notified),)

POINTS = [
    Point(EngineCore, "cached_tokens", _of_request),
    Point(EngineCore, "add_request", _of_request),
    Point(EngineCore, "reserve", _of_request),
    Point(EngineCore, "admit", scopes=ADMITTING),
    # `reserve` counts on it that blocks are allocated last.
    Point(KVCacheManager, "start", _of_sequence, whens=("before",)),
    Point(KVCacheManager, "cache_computed", _of_sequence),
    Point(EngineSequence, "scheduled", _own),
    Point(EngineSequence, "append", _own),
    Point(EngineSequence, "take_progress", _own),
    Point(EngineSequence, "text", _own),
    Point(OutputText, "push", scopes=TEXT),
    Point(OutputText, "flush", scopes=TEXT),
    Point(ReservationTable, "open", _first),
    Point(ReservationTable, "bind_writer", scopes=OPENING),
    Point(HandoffVerifier, "expect", scopes=OPENING),
    Point(HandoffVerifier, "matches", scopes=NOTIFYING),
    Point(KvMemory, "digests", scopes=NOTIFYING),
    Point(LiveRequest, "admitted", _engine_id),
    Point(LiveRequest, "progressed", _engine_id),
    Point(KvPusher, "start", _first),
    Point(KvPusher, "on_progress", _first),
    Point(KvPusher, "_write", lambda _self, push, *_: push.request_id),
    Point(KvPusher, "_complete", lambda _self, push, _now: push.request_id),
    Point(KvMemory, "digests", scopes=PUSHING),
    Point(KvProducer, "_on_output", lambda _self, _core, output, _now: output.request_id),
]


class Permissive:
    """A grammar that allows every token; as its own matcher it serves one sequence."""

    eos_token_ids: frozenset[int] = frozenset()
    complete = False
    error = ""
    mask = np.full(-(-VOCABULARY_SIZE // 32), -1, dtype=np.int32)

    def matcher(self) -> Permissive:
        return self

    def advance(self, token_ids: Sequence[int]) -> None:
        pass

    def wait(self, timeout_s: float = 0.0) -> bool:
        return True

    def close(self) -> None:
        pass


def failing_grammar(name: str, make: Callable[[], BaseException], number: int) -> Permissive:
    """One whose method or property of this name raises at the call with this number."""
    left = number

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise make()

    class Failing(Permissive):
        pass

    inner = getattr(Permissive, name)
    if callable(inner):

        def method(self: Permissive, *args: Any) -> Any:
            count()
            return inner(self, *args)

        setattr(Failing, name, method)
    else:

        def read(_self: Permissive) -> Any:
            count()
            return inner

        setattr(Failing, name, property(read))
    return Failing()


PROMPT = [(7 * n) % 250 for n in range(45)]


NAMES = [
    f"{who}-{how}-{form}"
    for who in ("other", VICTIM)
    for how in ("handed", "local")
    for form in ("plain", "grammar")
]
Answers = list[Granted | SplitserveError]


class Scene:
    """Victims and others, handed over and computed locally, plain and with a grammar, all at once."""

    def __init__(self, grammar: Permissive | None = None, num_blocks: int = 128) -> None:
        self.pair = ConnectorPair(verify_kv="all", num_blocks=num_blocks)
        self.victim_grammar = grammar or Permissive()
        self.refused: set[str] = set()
        self.waiting: dict[str, Answers] = {}

    def run(self, leaves: Mapping[str, int] = MappingProxyType({})) -> dict[str, list[int]]:
        """The tokens of all requests. `leaves`: who is aborted in which round."""
        for name in NAMES:
            self.begin(name)
        for number in range(120):
            self.rounds(1)
            self.leave([name for name, when in leaves.items() if when == number])
        self.leave([name for name in NAMES if VICTIM in name])
        self.rounds(20)
        self.pair.clock.now += 200
        self.rounds(5)
        return {name: self.pair.tokens(name) for name in NAMES}

    def begin(self, name: str) -> None:
        prompt, fields = self.asked(name)
        with self.answering(name):
            local = len(prompt) if "local" in name else 0
            self.waiting[name] = self.pair.reserve(name, prompt, local, **fields)
        self.go_on()

    def asked(self, name: str) -> tuple[list[int], dict[str, Any]]:
        grammar = self.victim_grammar if VICTIM in name else Permissive()
        return [NAMES.index(name), *PROMPT], {"grammar": grammar} if "grammar" in name else {}

    def go_on(self) -> None:
        """Starts the prefill of what was granted."""
        for name in [name for name, answers in self.waiting.items() if answers]:
            (answer,) = self.waiting.pop(name)
            prompt, fields = self.asked(name)
            if not isinstance(answer, Granted):
                assert VICTIM in name
                self.refused.add(name)
            elif answer.ticket is not None:
                with self.answering(name):
                    self.pair.start(name, prompt, answer.ticket, **fields)

    @contextmanager
    def answering(self, name: str) -> Iterator[None]:
        """A call of one request: what it raises is the answer to that call alone."""
        try:
            yield
        except BrokenInvariantError:
            raise
        except BaseException:
            assert VICTIM in name
            self.refused.add(name)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.pair.round()
            self.go_on()

    def leave(self, names: list[str]) -> None:
        """What a coordinator does in the end, or when the client goes away."""
        pair = self.pair
        for name in names:
            pair.producer.end(pair.prefill, name, None, pair.clock.now)
            pair.consumer.abort(pair.decode, f"{COORDINATOR}/{name}", COORDINATOR, False, pair.clock.now)

    def ended_well(self, name: str) -> bool:
        """Whether a request was answered as a whole, or its failure was told."""
        events = self.pair.prefill_events[name]
        outputs = [o for o in self.pair.decode_outputs[COORDINATOR] if o.request_id == name]
        failed = any(isinstance(event, Failed) for event in events) or any(o.failure.reason for o in outputs)
        return failed or name in self.refused or len(self.pair.tokens(name)) == MAX_TOKENS


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlapping"])
def overlaps(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return Scene().run()


def check(
    scene: Scene, expected: dict[str, list[int]], leaves: Mapping[str, int] = MappingProxyType({})
) -> None:
    tokens = scene.run(leaves)
    for name, right in expected.items():
        if VICTIM in name:
            assert tokens[name] == right[: len(tokens[name])]
            assert name in leaves or scene.ended_well(name), name
        else:
            assert tokens[name] == right, name
    scene.pair.assert_empty()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_a_fault_in_one_request_leaves_the_others_alone(
    point: Point, kind: str, overlaps: bool, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedRunner, "overlaps", overlaps)
    for when in point.whens:
        for number in (1, 2, 5):
            plan = Plan(KINDS[kind], when, number)
            with monkeypatch.context() as patches:
                point.patch(patches, plan)
                check(Scene(), expected)
            assert plan.fired or number > 1, "the point is not on any request's way any more"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["matcher", "advance", "wait", "mask", "complete", "error", "eos_token_ids"])
def test_a_grammar_that_raises_fails_its_request_alone(
    name: str, kind: str, overlaps: bool, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedRunner, "overlaps", overlaps)
    for number in (1, 2, 5, 9):
        check(Scene(failing_grammar(name, KINDS[kind], number)), expected)


@pytest.mark.slow
@settings(max_examples=100)
@given(
    faults=st.lists(
        st.tuples(
            st.sampled_from(POINTS), st.sampled_from(sorted(KINDS)), st.integers(0, 1), st.integers(1, 12)
        ),
        min_size=1,
        max_size=3,
        unique_by=lambda fault: (fault[0].owner, fault[0].name),
    ),
    leaves=st.dictionaries(
        st.sampled_from([name for name in NAMES if VICTIM in name]), st.integers(0, 30), max_size=3
    ),
    num_blocks=st.sampled_from([16, 24, 40, 128]),
    late=st.booleans(),
)
def test_several_faults_where_blocks_are_short(
    expected: dict[str, list[int]],
    faults: list[tuple[Point, str, int, int]],
    leaves: dict[str, int],
    num_blocks: int,
    late: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(SimulatedRunner, "overlaps", late)
        for point, kind, when, number in faults:
            point.patch(patches, Plan(KINDS[kind], point.whens[when % len(point.whens)], number))
        check(Scene(num_blocks=num_blocks), expected, leaves)


def test_a_reservation_whose_deadline_passed_while_it_waited_is_no_fault() -> None:
    """Blocks come free in the step in which it passes, and another reservation is granted before it is told."""
    pair = ConnectorPair(num_blocks=16)
    first = pair.reserve("first", list(range(60)))
    waiting = pair.reserve("waiting", list(range(100, 160)), deadline_s=pair.clock.now + 5)
    assert (len(first), len(waiting)) == (1, 0)
    pair.consumer.abort(pair.decode, f"{COORDINATOR}/first", COORDINATOR, True, pair.clock.now)
    pair.clock.now += 6
    late = pair.reserve("late", list(range(200, 230)))
    (told,) = waiting
    assert isinstance(told, DeadlineExceededError)
    pair.round()
    assert isinstance(late[0], Granted)
    pair.consumer.abort(pair.decode, f"{COORDINATOR}/late", COORDINATOR, True, pair.clock.now)
    pair.round()
    pair.assert_empty()
