"""An engine core on an instant simulated model, with its outputs gathered by request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.core.engine import EngineRequest, RequestOutput, StepResult, StopParams
from engine.core.engine_core import EngineCore
from engine.core.model_runner import PendingStep, SampledToken, SamplingParams, ScheduledSequence
from engine.runner.simulated_runner import EOS_TOKEN_ID, SimulatedRunner
from splitserve.config.engine import EngineConfig
from tests.support.engine.byte_tokenizer import ByteTokenizer
from tests.support.engine.simulated_tokens import expected_tokens

BLOCK = 4
PROMPT = b"The quick brown fox"
INSTANT = {"simulated_step_s": 0.0, "simulated_prefill_token_s": 0.0, "simulated_sequence_s": 0.0}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Script(SimulatedRunner):
    """A simulated model that says what it is told to, then goes on by itself."""

    def __init__(
        self, config: EngineConfig, script: Sequence[int] = (), error: Exception | None = None
    ) -> None:
        super().__init__(config)
        self.script = list(script)
        self.error = error

    def begin(self, batch: Sequence[ScheduledSequence]) -> PendingStep:
        """As a device does it: what it was told holds, whatever becomes of the sequences meanwhile."""
        copies = [
            each._replace(token_ids=list(each.token_ids), block_ids=list(each.block_ids)) for each in batch
        ]
        return super().begin(copies)

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        if self.error is not None:
            raise self.error
        sampled = super().execute(batch)
        return [
            SampledToken(self.script.pop(0)) if token is not None and self.script else token
            for token in sampled
        ]


class Rig:
    """A core with its runner and a clock that stands still.

    With `overlaps`, outputs of a step are collected once the next one has begun, as `EngineThread` does it.
    """

    overlaps = False
    """What rigs do that are not told otherwise."""

    def __init__(
        self,
        script: Sequence[int] = (),
        error: Exception | None = None,
        overlaps: bool | None = None,
        kind: type[Script] = Script,
        **overrides: int | bool,
    ) -> None:
        values = {"block_size_tokens": BLOCK, "num_blocks": 64, "max_step_tokens": 32, **INSTANT, **overrides}
        self.config = config = EngineConfig.model_validate(values)
        self.clock = Clock()
        self.runner = kind(config, script, error)
        self.runner.overlaps = self.overlaps if overlaps is None else overlaps
        self.core = EngineCore(self.runner, config, ByteTokenizer(), self.clock)
        self.outputs: dict[str, RequestOutput] = {}
        self.results: list[StepResult] = []
        self.between_halves: Callable[[], object] = lambda: None

    def step(self) -> None:
        self.core.collect()
        if not self.core.result_can_wait:
            self.deliver()
        self.core.begin_step()
        self.between_halves()
        self.deliver()
        self.core.finish_step()
        if not self.core.result_can_wait:
            self.deliver()

    def deliver(self) -> None:
        result = self.core.take_result()
        if result is not None:
            self.results.append(result)
            for output in result.outputs:
                self.collect(output)

    def collect(self, output: RequestOutput) -> None:
        merged = self.outputs.get(output.request_id)
        if merged is None:
            self.outputs[output.request_id] = replace(output, token_ids=list(output.token_ids))
            return
        assert merged.finish_reason is None
        assert output.first_position == merged.first_position + len(merged.token_ids)
        merged.token_ids += output.token_ids
        merged.text += output.text
        merged.logprobs = merged.logprobs + output.logprobs
        merged.finish_reason, merged.failure = output.finish_reason, output.failure

    def run(self) -> dict[str, RequestOutput]:
        for _ in range(10_000):
            if not self.core.has_work():
                self.deliver()
                return self.outputs
            self.step()
        raise AssertionError("the engine does not come to an end")

    def assert_clean(self) -> None:
        load = self.core.load()
        assert (load.reserved_blocks, load.quarantined_blocks, load.referenced_blocks) == (0, 0, 0)
        assert load.free_blocks == load.total_blocks
        assert (load.waiting_requests, load.running_requests, load.waiting_tokens) == (0, 0, 0)


def request(
    name: str = "r", prompt: bytes | Sequence[int] = PROMPT, max_tokens: int = 12, **fields: object
) -> EngineRequest:
    stop = StopParams(max_tokens, frozenset({EOS_TOKEN_ID}))
    made = EngineRequest(name, tuple(prompt), SamplingParams(temperature=0), stop)
    return replace(made, **fields)  # type: ignore[arg-type]


def stopping(**fields: object) -> StopParams:
    return replace(StopParams(12, frozenset({EOS_TOKEN_ID})), **fields)  # type: ignore[arg-type]


def expected_text(prompt: Sequence[int], count: int) -> str:
    return bytes(expected_tokens(list(prompt), count)).decode()


def hand_over(prefill: Rig, decode: Rig, asked: EngineRequest, number: int = 1) -> int | None:
    """Prefills on one rig and copies the blocks to the other; returns the first token."""
    reserved = decode.core.reserve(asked, number)
    assert reserved is not None
    prefill.core.add_request(replace(asked, prefill_only=True))
    blocks: list[int] = []
    end, token = 0, None
    while token is None:
        result = prefill.core.step()
        for progress in result.progress:
            assert progress.start == end
            end, blocks = progress.end, progress.block_ids
            assert len(blocks) == -(-end // BLOCK)
        for output in result.outputs:
            prefill.collect(output)
            token = output.token_ids[0]
    assert end == len(asked.token_ids)
    source = blocks[reserved.cached_tokens // BLOCK :]
    decode.runner.pool[list(reserved.block_ids)] = prefill.runner.pool[source]
    prefill.core.release_held(asked.request_id)
    return token
