"""An engine whose neighbour wants its cores: when it rests between steps, when it does not, and what ends a rest.

Time is the rig's: a step takes what the runner says it does.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.types import SampledToken, ScheduledSequence
from engine.pacing.lending import MAX_REST_S
from engine.pacing.token_clock import ServiceTargets
from engine.runner.simulated_runner import expected_tokens
from tests.support.engine.engine_rig import Clock, Rig, Script, hand_over, request

STEP_S = 0.0125
TPOT_S = 0.05
TARGETS = ServiceTargets(tpot_s=TPOT_S)
PROMPT = list(range(97, 117))


class Owner(Script):
    """Takes time for each step; a neighbour wants its cores while `wanted`, and uses them whenever it rests."""

    clock = Clock()
    wanted = False
    resting = False
    uses = 0

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        self.resting = False
        self.clock.now += STEP_S
        return super().execute(batch)

    def demand(self) -> int | None:
        self.uses += self.resting
        return self.uses if self.wanted else None

    def rest(self) -> None:
        self.resting = True


class Worker(Rig):
    """A rig that sleeps as the engine thread does, and notes when each stream's tokens came."""

    def __init__(self, **overrides: int | bool) -> None:
        super().__init__(kind=Owner, **{"num_blocks": 2000, "max_step_tokens": 512, **overrides})
        self.owner.clock = self.clock
        self.rested_s = 0.0
        self.times: dict[str, list[float]] = {}
        for name in ("warm", "warm-again"):
            self.core.add_request(request(name, PROMPT, max_tokens=40))
            self.go_on()
        self.rested_s = 0.0

    @property
    def owner(self) -> Owner:
        assert isinstance(self.runner, Owner)
        return self.runner

    def step(self) -> None:
        super().step()
        for output in self.results[-1].outputs:
            self.times.setdefault(output.request_id, []).append(self.clock.now)

    def go_on(self, until_s: float = float("inf")) -> None:
        """Steps and rests until there is nothing to do, or for so long."""
        while self.clock.now < until_s:
            if self.core.has_work():
                self.step()
            elif self.core.next_deadline() < float("inf"):
                assert self.owner.resting
                assert self.core.next_deadline() > self.clock.now
                self.rested_s += self.core.next_deadline() - self.clock.now
                self.clock.now = self.core.next_deadline()
            else:
                return

    def stream(self, name: str, targets: ServiceTargets | None = TARGETS, max_tokens: int = 100) -> None:
        self.core.add_request(request(name, PROMPT, max_tokens=max_tokens, targets=targets))


def assert_in_time(times: list[float], tokens: int, tpot_s: float = TPOT_S) -> None:
    assert len(times) == tokens
    assert all(now - times[0] <= tpot_s * count + 1e-6 for count, now in enumerate(times))


def test_streams_with_targets_lend_what_they_do_not_need() -> None:
    worker = Worker()
    began_s = worker.clock.now
    worker.stream("a")
    worker.stream("b", ServiceTargets(tpot_s=0.1))
    worker.owner.wanted = True
    worker.go_on()
    assert worker.rested_s > 0.6 * (worker.clock.now - began_s)
    for name, tpot_s in (("a", TPOT_S), ("b", 0.1)):
        assert_in_time(worker.times[name], 100, tpot_s)
        assert worker.outputs[name].token_ids == list(expected_tokens(PROMPT, 100))
    assert worker.core.next_deadline() == float("inf")
    worker.assert_clean()


def test_a_stream_without_a_target_is_never_delayed() -> None:
    worker = Worker()
    worker.owner.wanted = True
    worker.stream("a")
    worker.stream("free", targets=None)
    worker.go_on()
    assert worker.times["free"][-1] - worker.times["free"][0] < 99.5 * STEP_S
    assert worker.rested_s == 0


def test_nothing_is_slower_while_nobody_wants_the_cores() -> None:
    worker = Worker()
    worker.stream("a")
    worker.go_on()
    assert worker.times["a"][-1] - worker.times["a"][0] < 99.5 * STEP_S
    assert worker.rested_s == 0


def resting(worker: Worker) -> None:
    """Brings a worker into a rest."""
    worker.stream("a")
    worker.go_on(worker.clock.now + 20 * STEP_S)
    worker.owner.wanted = True
    while not worker.owner.resting:
        worker.step()
    assert not worker.core.has_work()


def test_a_prompt_ends_a_rest_at_once() -> None:
    worker = Worker()
    resting(worker)
    worker.stream("next")
    assert worker.core.has_work()
    worker.step()
    assert not worker.core.load().waiting_requests
    worker.go_on()
    assert_in_time(worker.times["a"], 100)
    worker.assert_clean()


def test_a_handoff_in_a_rest_keeps_the_rest_within_its_own_target() -> None:
    worker, prefill = Worker(), Rig(num_blocks=2000)
    resting(worker)
    asked = request("handed", [*PROMPT, 99], max_tokens=60, targets=ServiceTargets(tpot_s=0.02))
    token = hand_over(prefill, worker, asked)
    assert token is not None
    worker.core.admit(1, token)
    worker.core.release_writer(1)
    first_s = worker.clock.now
    assert worker.core.has_work()  # 20 ms a token leave nothing beside steps of 12.5 ms
    worker.go_on()
    assert_in_time([first_s, *worker.times["handed"]], 60, 0.02)
    worker.assert_clean()


def test_the_end_of_the_last_stream_ends_a_rest() -> None:
    worker = Worker()
    resting(worker)
    assert worker.core.abort("a")
    assert not worker.core.has_work()
    assert worker.core.next_deadline() == float("inf")
    worker.assert_clean()


def test_a_worker_whose_last_stream_is_aborted_between_steps_lends_its_cores() -> None:
    worker = Worker()
    worker.stream("a")
    worker.stream("b")
    worker.step()
    assert worker.core.abort("a")
    assert not worker.owner.resting
    assert worker.core.abort("b")
    assert not worker.core.has_work()
    assert worker.owner.resting
    worker.assert_clean()


def test_a_reservation_that_found_no_room_is_not_kept_waiting() -> None:
    worker = Worker(max_running_requests=1)
    resting(worker)
    assert worker.core.reserve(request("b", PROMPT), 1) is None
    worker.core.reservations_wait(True)
    assert worker.core.has_work()
    worker.go_on()
    assert worker.outputs["a"].finish_reason is not None
    assert worker.core.reserve(request("b", PROMPT), 1) is not None


def test_streams_lend_again_once_a_waiting_reservation_has_been_given_up() -> None:
    worker = Worker(max_running_requests=1)
    resting(worker)
    worker.core.reservations_wait(True)
    for _ in range(10):
        worker.step()
    rested_s = worker.rested_s
    worker.core.reservations_wait(False)
    worker.go_on()
    assert worker.rested_s > rested_s


def test_a_request_that_is_over_its_deadline_ends_in_a_rest() -> None:
    worker = Worker()
    resting(worker)
    deadline_s = worker.clock.now + 0.02
    assert worker.core.reserve(request("b", PROMPT, deadline_s=deadline_s), 1) is not None
    assert worker.core.next_deadline() <= deadline_s
    worker.go_on(deadline_s)
    worker.go_on(worker.clock.now + 1e-3)
    assert worker.outputs["b"].failure is not None


def test_steps_before_and_after_rests_are_measured_alike() -> None:
    worker = Worker()
    before_s = worker.core.load().decode_step_s
    worker.owner.wanted = True
    worker.stream("a", max_tokens=200)
    worker.go_on()
    assert worker.rested_s > MAX_REST_S
    assert abs(worker.core.load().decode_step_s - before_s) < 1e-3
