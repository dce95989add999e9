"""Contiguous KV rows: whichever sequences join and leave, each row equals the pool, within the memory allowed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.torch_native.contiguous_kv import ContiguousKv
from engine.core.types import SamplingParams, ScheduledSequence

LAYERS, HEADS, BLOCK, HEAD_DIM = 2, 2, 4, 3
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 4
NUM_BLOCKS = 400


@dataclass(eq=False)
class Request:
    """A sequence with blocks of its own; its KV at a position is made from both."""

    number: int
    blocks: list[int]
    tokens: list[int] = field(default_factory=list)
    computed: int = 0

    def scheduled(self) -> ScheduledSequence:
        return ScheduledSequence(
            request_id=str(self.number),
            token_ids=self.tokens,
            prompt_tokens=1,
            num_computed=self.computed,
            num_new=1,
            block_ids=self.blocks,
            sample=True,
            sampling=SamplingParams(),
        )


class Machine:
    """A pool, its rows, and sequences that decode."""

    def __init__(self, max_bytes: int) -> None:
        self.pool = torch.full((NUM_BLOCKS, LAYERS, 2, HEADS, BLOCK, HEAD_DIM), float("nan"))
        self.rows = ContiguousKv(self.pool, max_bytes)
        self.max_bytes = max_bytes
        self.free = list(range(NUM_BLOCKS))
        self.running: list[Request] = []
        self.numbers = 0

    def join(self, length: int) -> None:
        needed = -(-(length + 100) // BLOCK)
        if len(self.free) < needed:
            return
        self.numbers += 1
        request = Request(self.numbers, [self.free.pop() for _ in range(needed)])
        request.tokens += range(length)
        for position in range(length):
            self.write(request, position)
        request.computed = length
        self.running.append(request)

    def write(self, request: Request, position: int) -> None:
        block, offset = request.blocks[position // BLOCK], position % BLOCK
        self.pool[block, :, :, :, offset] = self.value(request, position)

    def leave(self, which: int) -> None:
        if self.running:
            gone = self.running.pop(which % len(self.running))
            self.pool[gone.blocks] = float("nan")
            self.free += gone.blocks

    def step(self, again: bool, accepted: int) -> None:
        """Each sequence gets a token, and every second one `accepted` ones more by a draft."""
        batch = [request.scheduled() for request in self.running]
        for _ in range(1 + again):
            assigned = self.rows.assign_rows(batch, range(len(batch)))
            seen: list[int] = []
            for size_class in assigned:
                assert size_class.memory.shape[2] == len(size_class.members)
                for row, index in enumerate(size_class.members):
                    self.check(size_class.memory[:, :, row], self.running[index])
                seen += size_class.members
            assert len(seen) == len(set(seen))
            assert self.rows.num_bytes <= self.max_bytes
            if self.max_bytes > 10**8:
                assert sorted(seen) == list(range(len(batch)))
        for request in self.running:
            for _ in range(1 + accepted * (request.number % 2)):
                self.write(request, request.computed)
                request.computed += 1
                request.tokens.append(0)

    def check(self, row: torch.Tensor, request: Request) -> None:
        for position in range(request.computed):
            assert (row[:, :, :, position] == self.value(request, position)).all()
        assert torch.isfinite(row).all()
        assert row.shape[3] > request.computed
        row[:, :, :, request.computed] = self.value(request, request.computed)

    def value(self, request: Request, position: int) -> float:
        return float(1000 * request.number + position)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(0, 150)),
        st.tuples(st.just("leave"), st.integers(0, 20)),
        st.tuples(st.just("step"), st.integers(0, 5)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps, st.sampled_from([TOKEN_BYTES * 200, TOKEN_BYTES * 500, 10**9]))
def test_rows_hold_what_the_pool_holds(moves: list[tuple[str, int]], max_bytes: int) -> None:
    machine = Machine(max_bytes)
    for move, number in moves:
        if move == "join":
            machine.join(number)
        elif move == "leave":
            machine.leave(number)
        elif machine.running:
            machine.step(again=number == 0, accepted=number % 4)


def test_a_sequence_that_outgrows_its_row_moves_on() -> None:
    machine = Machine(10**9)
    machine.join(30)
    for _ in range(60):
        machine.step(again=False, accepted=0)
    assert machine.running[0].computed == 90


def test_a_row_gives_way_when_nobody_decodes() -> None:
    machine = Machine(10**9)
    machine.join(30)
    machine.step(again=False, accepted=0)
    assert machine.rows.num_bytes > 0
    machine.rows.assign_rows([], [])
    assert machine.rows.num_bytes == 0
