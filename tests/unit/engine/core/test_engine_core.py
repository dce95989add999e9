"""EngineCore on the simulated model: correct tokens and finish reasons, no leaked block."""

from __future__ import annotations

import pytest

from engine.core.engine import EngineRequest, FinishReason, StopParams
from engine.core.sequence import OutputText
from engine.runner.simulated_runner import EOS_TOKEN_ID
from splitserve.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from tests.support.engine.byte_tokenizer import ByteTokenizer
from tests.support.engine.engine_rig import PROMPT, Rig, expected_text, request, stopping
from tests.support.engine.simulated_tokens import expected_tokens


@pytest.fixture(params=[False, True], ids=["in turn", "overlapping"], autouse=True)
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "overlaps", request.param)


@pytest.mark.parametrize("budget", [1, 5, 32])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 30])
def test_tokens_and_text_are_those_of_the_model(length: int, budget: int) -> None:
    rig, prompt = Rig(max_step_tokens=budget), list(range(40, 40 + length))
    rig.core.add_request(request(prompt=prompt))
    output = rig.run()["r"]
    assert output.token_ids == expected_tokens(prompt, 12)
    assert output.text == expected_text(prompt, 12)
    assert (output.first_position, output.finish_reason) == (0, FinishReason.LENGTH)
    rig.assert_clean()


@pytest.mark.parametrize("split", [1, 5, 11])
def test_a_resumed_request_continues_where_it_was(split: int) -> None:
    whole = expected_tokens(PROMPT, 12)
    rig = Rig()
    rig.core.add_request(request(prompt=[*PROMPT, *whole[:split]], prior_output_tokens=split))
    output = rig.run()["r"]
    assert output.first_position == split
    assert output.token_ids == whole[split:]
    assert output.text == expected_text(PROMPT, 12)[split:]


@pytest.mark.parametrize(
    ("stop", "script", "tokens", "text"),
    [
        (stopping(), [*b"ab", EOS_TOKEN_ID], 3, "ab"),
        (stopping(stop_token_ids=frozenset({98})), [*b"abc"], 2, "a"),
        (stopping(stop_strings=("cd", "e")), [*b"abcdef"], 4, "ab"),
        (stopping(stop_strings=("cdx",)), [*b"abcd", EOS_TOKEN_ID], 5, "abcd"),
        (stopping(stop_strings=("a", "d"), min_tokens=3), [*b"abcdef"], 4, "abc"),
        (stopping(min_tokens=2), [EOS_TOKEN_ID, *b"ab", EOS_TOKEN_ID], 4, "ab"),
        (stopping(max_tokens=2), [97, 0xC3], 2, "a\ufffd"),
    ],
)
def test_stop_conditions(stop: StopParams, script: list[int], tokens: int, text: str) -> None:
    rig = Rig(script)
    rig.core.add_request(request(stop=stop))
    output = rig.run()["r"]
    assert output.token_ids == script[:tokens]
    assert output.text == text


def test_ending_tokens_are_banned_before_min_tokens() -> None:
    third = expected_tokens(PROMPT, 3)[2]
    rig = Rig()
    rig.core.add_request(request(stop=stopping(stop_token_ids=frozenset({third}), min_tokens=3)))
    tokens = rig.run()["r"].token_ids
    assert len(tokens) > 3
    assert third not in tokens[:3]


@pytest.mark.parametrize("blocks", [64, 7])
def test_a_sequence_ends_with_the_context_or_the_pool(blocks: int) -> None:
    rig = Rig(num_blocks=blocks, context_tokens=25 if blocks == 64 else 1000)
    rig.core.add_request(request(max_tokens=100))
    output = rig.run()["r"]
    assert output.finish_reason is FinishReason.LENGTH
    assert (
        len(PROMPT) + len(output.token_ids)
        == rig.core._limits.sequence_tokens
        == (25 if blocks == 64 else 29)
    )
    rig.assert_clean()


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (request(prompt=[]), "prompt"),
        (request(prompt=[1] * 100), "prompt"),
        (request(prompt=[257]), "token_ids"),
        (request(prior_output_tokens=len(PROMPT)), "prior_output_tokens"),
        (request(prior_output_tokens=12), "max_tokens"),
    ],
)
def test_invalid_requests_are_refused(bad: EngineRequest, field: str) -> None:
    rig = Rig(context_tokens=100)
    with pytest.raises(InvalidArgumentError) as refused:
        rig.core.add_request(bad)
    assert refused.value.field == field
    rig.assert_clean()


def test_the_queue_is_bounded_with_a_retry_hint() -> None:
    rig = Rig(max_waiting_requests=2)
    for name in "ab":
        rig.core.add_request(request(name))
    with pytest.raises(ResourceExhaustedError) as refused:
        rig.core.add_request(request("c"))
    assert refused.value.reason == "QUEUE_FULL"
    assert refused.value.retry_after_s is not None


def test_deadlines_hold_in_every_state() -> None:
    rig = Rig(num_blocks=16, max_running_requests=2)
    rig.core.add_request(request("running", deadline_s=110.0, max_tokens=40))
    rig.step()
    rig.core.reserve(request("reserved", b"x", deadline_s=105.0), 1)
    rig.core.add_request(request("waiting", deadline_s=103.0))
    assert rig.core.next_deadline() == 103.0
    for now, name in ((103.0, "waiting"), (105.0, "reserved"), (110.0, "running")):
        rig.clock.now = now
        rig.step()
        rig.deliver()
        failure = rig.outputs[name].failure
        assert failure is not None
        assert failure[0] == "DEADLINE_EXCEEDED"
        assert rig.outputs[name].finish_reason is FinishReason.ABORT
    rig.core.release_writer(1)
    rig.assert_clean()


def test_a_stalled_engine_has_no_work_until_something_changes() -> None:
    rig = Rig(num_blocks=6)
    rig.core.reserve(request("holder"), 1)
    rig.core.add_request(request("waits", b"x" * 12, max_tokens=1))
    rig.step()
    assert not rig.core.has_work()
    rig.core.abort("holder")
    rig.step()
    assert not rig.core.has_work()
    rig.core.release_writer(1)
    assert rig.run()["waits"].finish_reason is FinishReason.LENGTH


def test_blocks_of_a_preempted_sequence_go_to_those_that_fit() -> None:
    rig = Rig(num_blocks=8)
    rig.core.reserve(request("holder"), 1)
    rig.core.add_request(request("grows", b"x" * 8))
    rig.step()
    rig.core.add_request(request("small", b"y" * 5, max_tokens=2))
    assert rig.run()["small"].token_ids == expected_tokens(b"y" * 5, 2)
    assert rig.outputs["grows"].finish_reason is None
    rig.core.abort("holder")
    rig.core.release_writer(1)
    assert rig.run()["grows"].token_ids == expected_tokens(b"x" * 8, 12)
    rig.assert_clean()


def test_nothing_is_flushed_after_a_stop_string() -> None:
    text = OutputText(ByteTokenizer([b"a\x80"]), request(stop=stopping(stop_strings=("a",))))
    for _ in range(9):
        text.push(0x80)
    assert text.push(257)[1]
    assert text.flush() == ""


def test_errors_of_the_runner() -> None:
    rig = Rig(error=UnavailableError("no device", reason="DEVICE_LOST"))
    rig.core.add_request(request())
    assert rig.run()["r"].failure == ("DEVICE_LOST", "no device")
    rig.assert_clean()
    rig.runner.error = ValueError("a bug")
    rig.core.add_request(request())
    with pytest.raises(ValueError, match="a bug"):
        rig.core.step()


def test_load_counts_and_rates() -> None:
    rig = Rig(simulated_step_s=0)
    rig.core.add_request(request("a"))
    rig.core.add_request(request("b", b"x" * 50))
    assert rig.core.load().waiting_tokens == len(PROMPT) + 50
    result = rig.core.step()
    assert result.started == {"a": 0, "b": 0}
    assert result.scheduled_tokens == 32
    load = rig.core.load()
    assert (load.running_requests, load.waiting_requests) == (2, 0)
    assert load.waiting_tokens == 50 - 13
    assert load.referenced_blocks == 5 + 13
