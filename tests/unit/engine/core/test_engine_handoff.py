"""EngineCore on both sides of a handoff: reservations, held blocks, first tokens."""

from __future__ import annotations

import pytest

from engine.core.engine import FinishReason, StopParams
from engine.runner.simulated_runner import EOS_TOKEN_ID
from splitserve.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError, UnavailableError
from tests.support.engine.engine_rig import BLOCK, PROMPT, Rig, expected_text, hand_over, request, stopping
from tests.support.engine.simulated_tokens import expected_tokens


@pytest.fixture(params=[False, True], ids=["in turn", "overlapping"], autouse=True)
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "overlaps", request.param)


@pytest.mark.parametrize("length", [1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1])
@pytest.mark.parametrize("decode_has", [0, 2 * BLOCK, 100])
@pytest.mark.parametrize("prefill_has", [0, 2 * BLOCK, 100])
def test_a_handoff_gives_the_same_answer(length: int, decode_has: int, prefill_has: int) -> None:
    prefill, decode = Rig(max_step_tokens=7), Rig()
    prompt = list(range(50, 50 + length))
    for rig, known in ((prefill, prefill_has), (decode, decode_has)):
        if known:
            rig.core.add_request(request("warm", [*prompt[:known], 33], max_tokens=1))
            rig.run()
            rig.outputs.clear()
    asked = request(prompt=prompt)
    token = hand_over(prefill, decode, asked)
    assert token is not None
    assert decode.core.load().reserved_blocks + decode.core.load().referenced_blocks == -(-length // BLOCK)
    assert decode.core.admit(1, token) is None
    assert decode.core.release_writer(1)
    output = decode.run()["r"]
    assert [token, *output.token_ids] == expected_tokens(prompt, 12)
    assert prefill.outputs["r"].text + output.text == expected_text(prompt, 12)
    assert prefill.outputs["r"].finish_reason is None
    assert output.first_position == 1
    prefill.assert_clean()
    decode.assert_clean()


def test_a_whole_prompt_in_the_cache_needs_no_blocks_written() -> None:
    rig, prompt = Rig(), list(range(60, 60 + 2 * BLOCK))
    rig.core.add_request(request("warm", prompt, max_tokens=2))
    rig.run()
    reserved = rig.core.reserve(request(prompt=prompt), 7)
    assert reserved is not None
    assert (reserved.block_ids, reserved.cached_tokens) == ((), 2 * BLOCK)
    rig.core.admit(7, expected_tokens(prompt, 1)[0])
    rig.core.release_writer(7)
    assert rig.run()["r"].token_ids == expected_tokens(prompt, 12)[1:]
    rig.assert_clean()


def test_wrong_bytes_in_a_handoff_give_other_tokens() -> None:
    prefill, decode = Rig(), Rig()
    token = hand_over(prefill, decode, request())
    assert token is not None
    decode.runner.pool[0] ^= 1
    decode.core.admit(1, token)
    decode.core.release_writer(1)
    assert decode.run()["r"].token_ids != expected_tokens(PROMPT, 12)[1:]


def test_aborted_reservations_are_quarantined_until_the_writer_is_released() -> None:
    rig = Rig()
    assert rig.core.reserve(request(), 1) is not None
    assert rig.core.abort("r")
    assert not rig.core.abort("r")
    load = rig.core.load()
    assert (load.reserved_blocks, load.quarantined_blocks) == (0, 5)
    with pytest.raises(NotFoundError):
        rig.core.admit(1, 65)
    assert rig.core.reserve(request(), 2) is not None
    assert rig.core.release_writer(1)
    assert not rig.core.release_writer(1)
    assert rig.core.abort("r")
    assert rig.core.release_writer(2)
    rig.assert_clean()


def test_half_written_blocks_are_never_a_hit() -> None:
    rig = Rig()
    rig.core.reserve(request(), 1)
    rig.core.abort("r")
    rig.core.release_writer(1)
    reserved = rig.core.reserve(request(), 2)
    assert reserved is not None
    assert reserved.cached_tokens == 0


def test_reserve_waits_for_free_blocks_and_refuses_what_never_fits() -> None:
    rig = Rig(num_blocks=8, max_running_requests=2)
    assert rig.core.reserve(request("a", max_tokens=4), 1) is not None
    assert rig.core.reserve(request("b", b"four" * 3), 2) is None
    with pytest.raises(ResourceExhaustedError) as refused:
        rig.core.reserve(request("c", b"x" * 33), 3)
    assert refused.value.reason == "KV_POOL_TOO_SMALL"
    assert rig.core.reserve(request("d", b"x"), 4) is not None
    assert rig.core.reserve(request("e", b"x"), 5) is None
    rig.core.abort("a")
    assert rig.core.reserve(request("e", b"x"), 5) is not None


@pytest.mark.parametrize("how", ["finish", "abort", "fail"])
def test_blocks_of_a_prefill_are_held_until_released(how: str) -> None:
    rig = Rig(max_step_tokens=8)
    rig.core.add_request(request(prefill_only=True))
    rig.step()
    with pytest.raises(AssertionError):
        rig.core.release_held("r")
    if how == "finish":
        rig.run()
    elif how == "abort":
        rig.core.abort("r")
    else:
        rig.runner.error = UnavailableError("broken")
        rig.run()
        assert rig.outputs["r"].failure == ("UNAVAILABLE", "broken")
    assert rig.core.load().referenced_blocks == 5
    with pytest.raises(InvalidArgumentError):
        rig.core.add_request(request(prefill_only=True))
    assert rig.core.release_held("r")
    assert not rig.core.release_held("r")
    rig.assert_clean()


@pytest.mark.parametrize(
    ("stop", "script", "reason"),
    [
        (stopping(), [EOS_TOKEN_ID], FinishReason.STOP),
        (stopping(ignore_eos=True), [EOS_TOKEN_ID], None),
        (stopping(stop_token_ids=frozenset({65})), [65], FinishReason.STOP),
        (stopping(stop_strings=("A",)), [65], FinishReason.STOP),
        (stopping(max_tokens=1), [65], FinishReason.LENGTH),
        (stopping(), [65], None),
    ],
)
def test_a_prefill_reports_whether_the_answer_ends_with_its_token(
    stop: StopParams, script: list[int], reason: FinishReason | None
) -> None:
    rig = Rig(script)
    rig.core.add_request(request(prefill_only=True, stop=stop))
    output = rig.run()["r"]
    assert (output.token_ids, output.finish_reason) == (script, reason)


def test_a_prefill_pool_that_is_full_does_not_end_the_answer() -> None:
    rig = Rig(num_blocks=5)
    rig.core.add_request(request(prompt=b"x" * 5 * BLOCK, prefill_only=True))
    assert rig.run()["r"].finish_reason is None
