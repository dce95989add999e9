"""Random interleavings on engines with tiny pools: correct answers, no leaked block."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.engine import EngineRequest, RequestOutput
from engine.scheduling.waiting_queue import Precedence
from splitserve.errors import NotFoundError
from tests.support.engine.engine_rig import BLOCK, Rig, request
from tests.support.engine.simulated_tokens import expected_tokens


def check_answer(output: RequestOutput, prompt: Sequence[int]) -> None:
    whole = expected_tokens(list(prompt), output.first_position + len(output.token_ids))
    assert output.token_ids == whole[output.first_position :]


class Chaos:
    """Random interleavings on a pair of engines whose pools are far too small."""

    def __init__(self, seed: int, overlaps: bool) -> None:
        self.random = random.Random(seed)
        blocks, budget = self.random.choice([12, 20, 40]), self.random.choice([3, 8, 64])
        sizes = {"num_blocks": blocks, "max_step_tokens": budget}
        self.prefill = Rig(overlaps=overlaps, **sizes)
        self.decode = Rig(overlaps=overlaps, max_running_requests=6, max_bypasses=3, **sizes)
        self.decode.between_halves = self.interfere
        self.tokens_at_abort: dict[str, int] = {}
        """Tokens that an aborted request had at its abort."""
        self.prompts: dict[str, list[int]] = {}
        self.waiting_writes: dict[int, tuple[str, list[int], int]] = {}
        self.written: set[int] = set()
        self.stems = [[self.random.randrange(256) for _ in range(24)] for _ in range(3)]

    def prompt(self) -> list[int]:
        stem = self.random.choice(self.stems)[: self.random.randrange(25)]
        return stem + [self.random.randrange(256) for _ in range(self.random.randrange(1, 12))]

    def request(self) -> EngineRequest:
        name = f"r{len(self.prompts)}"
        self.prompts[name] = self.prompt()
        return request(
            name,
            self.prompts[name],
            max_tokens=self.random.randrange(2, 20),
            precedence=Precedence(
                self.random.randrange(2), self.random.randrange(2), self.random.randrange(3)
            ),
        )

    def add(self) -> None:
        self.decode.core.add_request(self.request())

    def reserve(self) -> None:
        asked = self.request()
        number = len(self.prompts)
        reserved = self.decode.core.reserve(asked, number)
        if reserved is not None:
            blocks = list(reserved.block_ids)
            self.waiting_writes[number] = (asked.request_id, blocks, reserved.cached_tokens)

    def write(self) -> None:
        """Prefills elsewhere and writes; admits only if the reservation is still alive."""
        if not self.waiting_writes:
            return
        number = self.random.choice(list(self.waiting_writes))
        name, blocks, cached = self.waiting_writes.pop(number)
        prompt = self.prompts[name]
        self.prefill.core.add_request(request(name, prompt, prefill_only=True))
        source: list[int] = []
        while name not in self.prefill.outputs:
            result = self.prefill.core.step()
            for progress in result.progress:
                source = progress.block_ids
            for output in result.outputs:
                self.prefill.collect(output)
        # The writer still owns the blocks, so this write is harmless even when the request has ended.
        self.decode.runner.pool[blocks] = self.prefill.runner.pool[source[cached // BLOCK :]]
        self.prefill.core.release_held(name)
        token = self.prefill.outputs[name].token_ids[0]
        try:
            self.decode.core.admit(number, token)
        except NotFoundError:
            assert name not in self.decode.outputs
        self.decode.core.release_writer(number)

    def drain(self) -> None:
        """A writer that gives up."""
        if self.waiting_writes:
            number = self.random.choice(list(self.waiting_writes))
            name, _, _ = self.waiting_writes.pop(number)
            self.end(name)
            self.decode.core.release_writer(number)

    def abort(self) -> None:
        if self.prompts:
            self.end(self.random.choice(list(self.prompts)))

    def end(self, name: str) -> None:
        if self.decode.core.abort(name):
            self.tokens_at_abort[name] = self.tokens_of(name)

    def tokens_of(self, name: str) -> int:
        return len(self.decode.outputs[name].token_ids) if name in self.decode.outputs else 0

    def interfere(self) -> None:
        """What may be called while the device computes."""
        if self.random.random() < 0.1:
            self.random.choice([self.abort, self.drain])()

    def step(self) -> None:
        for _ in range(self.random.randrange(1, 6)):
            self.decode.step()

    def run(self, actions: int) -> None:
        choices = [self.add, self.reserve, self.reserve, self.write, self.write, self.drain, self.abort]
        for _ in range(actions):
            self.random.choice([*choices, *[self.step] * 5])()
            load = self.decode.core.load()
            owned = load.reserved_blocks + load.quarantined_blocks + load.referenced_blocks
            assert owned + load.free_blocks == load.total_blocks
        while self.waiting_writes:
            self.write()
        self.decode.run()


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "overlapping"])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_interleavings_give_correct_answers_and_leak_nothing(overlaps: bool, seed: int) -> None:
    chaos = Chaos(seed, overlaps)
    chaos.run(120)
    for name, output in chaos.decode.outputs.items():
        check_answer(output, chaos.prompts[name])
        assert output.failure is None
    for name, tokens in chaos.tokens_at_abort.items():
        assert chaos.tokens_of(name) == tokens, "a request has no output after its abort"
    chaos.decode.assert_clean()
    chaos.prefill.assert_clean()


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "overlapping"])
@given(lengths=st.lists(st.integers(1, 26), min_size=2, max_size=8))
@settings(max_examples=40, deadline=None)
def test_preempted_sequences_all_finish_with_the_right_tokens(overlaps: bool, lengths: list[int]) -> None:
    rig = Rig(num_blocks=8, max_step_tokens=16, overlaps=overlaps)
    for index, length in enumerate(lengths):
        rig.core.add_request(request(str(index), [65 + index] * length, max_tokens=6))
    outputs = rig.run()
    for index, length in enumerate(lengths):
        assert outputs[str(index)].token_ids == expected_tokens([65 + index] * length, 6)
    rig.assert_clean()
