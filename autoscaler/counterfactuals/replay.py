"""One replay in a process of its own, which may be killed: `python -m autoscaler.counterfactuals.replay POLICY`.

It reads a `RecordedWindow` from standard input and writes a `ReplayScore`, or an error, as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from autoscaler.classes.class_demand import gpus_of
from autoscaler.counterfactuals.recorded_window import RecordedWindow
from autoscaler.decide import make_decide
from autoscaler.policies.policy_file import load_policy
from autoscaler.simulation.evaluation.comparison import bounds_of, under
from autoscaler.simulation.shared_simulation import SimulatedModel, simulate_shared
from autoscaler.simulation.simulator import Simulation
from splitserve.errors import DeadlineExceededError, SplitserveError, UnavailableError

REPLAY_S = 60.0
"""Deadline of one replay."""
NICENESS = 19
"""Replays take what CPU is left over."""


@dataclass(frozen=True, slots=True)
class ReplayScore:
    """What a policy would have made of a window."""

    requests: int
    attainment: float
    """Share of the requests within both targets."""
    replica_hours: float
    gpu_hours: float
    """By the policy's own `gpus_per_replica`."""


def replayed(window: RecordedWindow, policy: Path) -> ReplayScore:
    """Replays the window. Raises ConfigError for the file, and whatever the policy's own code raises."""
    rules = load_policy(policy)
    if window.limits:
        shared = simulate_shared(window.limits, {policy.stem: SimulatedModel(window.scenario(), rules)})
        run = shared.models[policy.stem]
    else:
        scenario = under(window.scenario(), rules)
        run = Simulation(scenario, make_decide(rules), rules.interval_s, bounds_of(rules), policy.stem).run()
    pools = {"prefill": rules.prefill, "decode": rules.decode}
    gpu_hours = sum(
        hours * gpus_of(pools[name], kind)
        for name, by_class in run.class_hours.items()
        for kind, hours in by_class.items()
    )
    return ReplayScore(len(run.requests), run.attainment, run.total_replica_hours, gpu_hours)


async def replay_apart(window: RecordedWindow, policy: Path, deadline_s: float = REPLAY_S) -> ReplayScore:
    """Replays it in a process of its own, which is killed at the deadline, and when the caller gives up.

    Raises DeadlineExceededError, and UnavailableError (REPLAY_FAILED) with what the process said.
    """
    pipe = asyncio.subprocess.PIPE
    words = [sys.executable, "-m", "autoscaler.counterfactuals.replay", str(policy)]
    made = asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL)
    making = asyncio.ensure_future(made)
    try:
        # Shielded: asyncio may wait for ever for a process whose making is cancelled.
        process = await asyncio.shield(making)
    except asyncio.CancelledError:
        await _ended(await making)
        raise
    try:
        async with asyncio.timeout(deadline_s):
            said, _ = await process.communicate(window.to_json().encode())
    except TimeoutError:
        raise DeadlineExceededError(f"replay of {policy.name}: not done within {deadline_s:g} s") from None
    finally:
        await _ended(process)
    try:
        answer = json.loads(said)
        return ReplayScore(**answer["score"])
    except (KeyError, TypeError, ValueError):
        words_said = said.decode(errors="replace").strip()[-200:] or f"ended with {process.returncode}"
        message = f"replay of {policy.name}: {words_said}"
        raise UnavailableError(message, reason="REPLAY_FAILED") from None


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Kills it, unless it has ended."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def main() -> None:
    """The process's own part."""
    os.nice(NICENESS)
    signal.alarm(math.ceil(2 * REPLAY_S))  # should the autoscaler be gone by then
    answer: dict[str, object]
    try:
        answer = {"score": asdict(replayed(RecordedWindow.from_json(sys.stdin.read()), Path(sys.argv[1])))}
    except SplitserveError as error:
        answer = {"error": error.message}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
