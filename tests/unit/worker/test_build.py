"""How an engine is built: the phases of a start."""

from __future__ import annotations

import os
import time

from worker.build import StartClock, StartPhases, process_age_s


def test_phases_follow_each_other() -> None:
    ages = iter([2.0, 5.0, 5.5])
    clock = StartClock(lambda: next(ages))
    clock.imported()
    clock.loaded()
    phases = clock.ready()
    assert phases == StartPhases(2.0, 3.0, 0.5)
    assert phases.total_s == 5.5
    assert phases.fields() == {"process": 2.0, "weights": 3.0, "warm_up": 0.5}
    assert phases.to_proto().weights_seconds == 3.0


def test_without_weights_that_phase_is_empty() -> None:
    ages = iter([2.0, 2.5])
    clock = StartClock(lambda: next(ages))
    clock.imported()
    assert clock.ready() == StartPhases(2.0, 0.0, 0.5)


def test_a_forked_process_is_as_old_as_the_fork() -> None:
    own_s = process_age_s()
    began_s = time.monotonic()
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.write(writer, repr(process_age_s()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    passed_s = time.monotonic() - began_s
    child_s = float(os.read(reader, 64))
    for end in (reader, writer):
        os.close(end)
    assert 0 <= child_s <= passed_s + 0.02  # the kernel tells it in hundredths
    assert process_age_s() >= own_s
