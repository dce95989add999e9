"""A prompt that is computed with a neighbour's cores: the same logits, whenever the neighbour wants them back."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.cpu import forward
from engine.backends.cpu.core_exchange import BorrowedCores, CoreExchange
from engine.backends.cpu.forward import CpuForward
from engine.backends.cpu.kernels import CpuKernels
from engine.pacing.lending import MIN_LENT_TOKENS
from engine.runner.torch_runner import TorchRunner
from tests.support.engine.cpu_kernels import kernels_or_skip
from tests.support.engine.runner_driver import Sequence_, make_sequences, prompt_of, runner_of

kernels_or_skip()
MINE, THEIRS, OTHERS = 1000, 1001, 1002
"""Names of cores; where threads really run does not matter here."""
PROMPT = 100


@pytest.fixture(autouse=True)
def threads_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads are not moved, since a machine may have one core; the system's refusal has a test of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2048)

    def use(kernels: CpuKernels, borrowed: BorrowedCores) -> bool:
        kernels._placed = borrowed.cores
        return placed(kernels, borrowed)

    placed = CpuKernels.use
    monkeypatch.setattr(CpuKernels, "use", use)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def runner(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Iterator[TorchRunner]:
    folder = tmp_path_factory.getbasetemp() / "tiny"
    made = runner_of(folder, "wide_llama", "bfloat16")
    assert isinstance(made._forward, CpuForward)
    made._forward._exchange = CoreExchange(tmp_path / "cores", (MINE,))
    step(made, 40)
    step(made, 1, decode=True)  # a graph of decode steps: from now on prompts are captured
    step(made, PROMPT)
    yield made
    made.close()


@pytest.fixture
def neighbour(tmp_path: Path, runner: TorchRunner) -> Iterator[CoreExchange]:
    exchange = CoreExchange(tmp_path / "cores", (THEIRS,))
    yield exchange
    exchange.close()


def step(
    runner: TorchRunner, tokens: int, decode: bool = False, between: Callable[[], object] = lambda: None
) -> torch.Tensor:
    """Logits of the last token of a prompt, or of a decode step after one of 20 and `between`."""
    sequence: Sequence_ = make_sequences([prompt_of(20 + tokens if decode else tokens)], 0, 1)[0]
    if decode:
        sequence.prompt_tokens = 20
        with torch.inference_mode():
            runner._forward.logits([sequence.scheduled(20)])
        sequence.computed = 20
        between()
    with torch.inference_mode():
        return runner._forward.logits([sequence.scheduled(tokens)]).values.clone()


def test_a_resting_neighbour_changes_no_logit(runner: TorchRunner, neighbour: CoreExchange) -> None:
    alone = step(runner, PROMPT)
    assert runner.speedup == 1
    neighbour.rest()
    assert torch.equal(step(runner, PROMPT), alone)
    assert runner.speedup == 2
    neighbour.work()
    assert torch.equal(step(runner, PROMPT), alone)
    assert runner.speedup == 1


def test_an_owner_learns_that_its_cores_are_wanted_while_a_chunk_is_computed(
    runner: TorchRunner, neighbour: CoreExchange
) -> None:
    seen: list[int | None] = []
    computing(runner, lambda at: seen.append(neighbour.demand()))
    neighbour.rest()
    step(runner, PROMPT)
    assert neighbour.demand() is None
    used = [number for number in seen if number is not None]
    assert len(used) == len(seen)
    assert used == sorted(used)
    assert used[-1] > used[0] + len(used) / 4


def test_for_a_short_chunk_nobody_is_asked_to_rest(runner: TorchRunner, neighbour: CoreExchange) -> None:
    alone = step(runner, MIN_LENT_TOKENS - 1)
    assert runner.speedup == 1
    neighbour.rest()
    seen: list[int | None] = []
    computing(runner, lambda at: seen.append(neighbour.demand()))
    assert torch.equal(step(runner, MIN_LENT_TOKENS - 1), alone)
    assert runner.speedup == 2
    assert set(seen) == {None}


def test_a_decode_step_uses_cores_that_rest_anyway(runner: TorchRunner, neighbour: CoreExchange) -> None:
    alone = step(runner, 1, decode=True)
    assert runner.speedup == 1
    neighbour.rest()
    seen: list[int | None] = []
    computing(runner, lambda at: seen.append(neighbour.demand()))
    assert torch.equal(step(runner, 1, decode=True), alone)
    assert runner.speedup == 2
    assert seen
    assert set(seen) == {None}  # nobody is to rest for it
    neighbour.work()
    assert torch.equal(step(runner, 1, decode=True), alone)
    assert runner.speedup == 1


@pytest.mark.parametrize("seed", range(3))
def test_a_decode_step_gives_cores_back_at_any_time(
    runner: TorchRunner, neighbour: CoreExchange, seed: int
) -> None:
    alone = step(runner, 1, decode=True)
    pick = random.Random(seed)
    computing(runner, lambda at: pick.choice((neighbour.rest, neighbour.work, lambda: None))())
    assert torch.equal(step(runner, 1, decode=True, between=neighbour.rest), alone)
    assert 1 < runner.speedup < 2


class Interrupted(CpuKernels):
    """Calls `between` before each operation of a chunk, with a number that counts them."""

    between: Callable[[int], object]
    count: int

    def run(self, ops: Any) -> None:
        if self._borrowed is None:
            super().run(ops)
            return
        for at in range(len(ops)):
            self.between(self.count)
            self.count += 1
            super().run(ops[at : at + 1])


def computing(runner: TorchRunner, between: Callable[[int], object]) -> None:
    """Makes a runner call this before each operation that might be computed on borrowed cores."""
    assert isinstance(runner._forward, CpuForward)
    kernels: Any = runner._forward._kernels
    kernels.__class__, kernels.between, kernels.count = Interrupted, between, 0


@pytest.mark.parametrize("seed", range(6))
def test_cores_that_come_and_go_at_any_time_change_no_logit(
    runner: TorchRunner, neighbour: CoreExchange, tmp_path: Path, seed: int
) -> None:
    alone = step(runner, PROMPT)
    other = CoreExchange(tmp_path / "cores", (OTHERS,))
    pick = random.Random(seed)

    def come_and_go(_: int) -> None:
        for owner in (neighbour, other):
            pick.choice((owner.rest, owner.work, lambda: None))()

    computing(runner, come_and_go)
    assert torch.equal(step(runner, PROMPT), alone)
    assert 1 < runner.speedup < 3
    other.close()


def test_cores_that_come_and_go_within_operations_change_no_logit(
    runner: TorchRunner, neighbour: CoreExchange
) -> None:
    alone = step(runner, PROMPT)
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            neighbour.rest()
            neighbour.work()

    restless = threading.Thread(target=come_and_go)
    restless.start()
    try:
        for _ in range(5):
            assert torch.equal(step(runner, PROMPT), alone)
    finally:
        ended.set()
        restless.join()


OWNER = """
import sys, time
from pathlib import Path
from engine.backends.cpu.core_exchange import CoreExchange
exchange = CoreExchange(Path(sys.argv[1]), (1003,))
exchange.rest()
print("ready", flush=True)
time.sleep(60)
"""


def test_an_owner_that_freezes_or_is_killed_stalls_nobody(runner: TorchRunner, tmp_path: Path) -> None:
    alone = step(runner, PROMPT)
    command = [sys.executable, "-c", OWNER, str(tmp_path / "cores")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        try:
            owner.send_signal(signal.SIGSTOP)
            assert torch.equal(step(runner, PROMPT), alone)
            assert runner.speedup == 2
            computing(runner, lambda at: owner.kill() if at == 3 else None)
            assert torch.equal(step(runner, PROMPT), alone)
            owner.wait()
            assert torch.equal(step(runner, PROMPT), alone)
            assert runner.speedup == 1
        finally:
            owner.kill()


def test_where_the_system_does_not_let_it_nothing_is_borrowed_again(
    runner: TorchRunner, neighbour: CoreExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(forward, "log_event", lambda event, **fields: logged.append(event))
    monkeypatch.setattr(CpuKernels, "use", lambda kernels, borrowed: False)
    alone = step(runner, PROMPT)
    neighbour.rest()
    for _ in range(2):
        assert torch.equal(step(runner, PROMPT), alone)
    assert logged == ["engine.core_exchange_off"]
