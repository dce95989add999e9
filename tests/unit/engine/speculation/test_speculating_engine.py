"""Whatever a drafter guesses, an engine's answers are those without it, and nothing of a wrong guess is left."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.core.types import EngineRequest, FinishReason
from engine.runner.simulated_runner import EOS_TOKEN_ID, expected_tokens
from engine.runner.structured_output import GrammarCompiler
from engine.speculation.drafter import Drafter
from engine.speculation.prompt_lookup import PromptLookup
from splitserve.generation.kv_blocks import extend_block_hashes
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.v1.generation_pb2 import Grammar
from tests.support.drafters import GuessingDrafter, garbage, mostly_right, oracle, replay
from tests.support.engine.engine_rig import (
    BLOCK,
    PROMPT,
    Rig,
    expected_text,
    hand_over,
    request,
    stopping,
)

DRAFTERS = {
    "oracle": lambda: GuessingDrafter(oracle),
    "garbage": lambda: GuessingDrafter(garbage()),
    "mostly-right": lambda: GuessingDrafter(mostly_right()),
    "prompt-lookup": PromptLookup,
}


@pytest.fixture(params=list(DRAFTERS))
def drafter(request: pytest.FixtureRequest) -> Drafter:
    made: Drafter = DRAFTERS[request.param]()
    return made


def answers_of(rig: Rig, requests: list[EngineRequest]) -> dict[str, object]:
    for one in requests:
        rig.core.add_request(one)
    found = {
        name: (output.token_ids, output.text, output.finish_reason, output.failure)
        for name, output in rig.run().items()
    }
    rig.assert_clean()
    return dict(sorted(found.items()))


def mixed_requests(seed: int) -> list[EngineRequest]:
    """Requests with every rule that ends an answer, some of them resumed."""
    pick = random.Random(seed)
    requests = []
    for number in range(6):
        prompt = [pick.randrange(32, 127) for _ in range(pick.randrange(1, 20))]
        count = pick.randrange(2, 30)
        answer = expected_tokens(prompt, count)
        text = bytes(answer).decode()
        stop = stopping(max_tokens=count, min_tokens=pick.choice([0, 0, count // 2, count]))
        match pick.randrange(4):
            case 0:
                stop = replace(stop, stop_token_ids=frozenset({pick.choice(answer)}))
            case 1:
                at = pick.randrange(len(text))
                stop = replace(stop, stop_strings=(text[at : at + 2], "zz"))
            case 2:
                stop = replace(stop, ignore_eos=True)
        prior = pick.randrange(count) if pick.random() < 0.4 else 0
        tokens = (*prompt, *answer[:prior])
        made = request(f"r{number}", tokens, stop=stop, prior_output_tokens=prior)
        requests.append(made)
    return requests


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_answers_are_those_without_drafts(drafter: Drafter, seed: int, overlaps: bool) -> None:
    """Few blocks, so that sequences are preempted, too."""
    options = {"overlaps": overlaps, "num_blocks": 24, "max_running_requests": 4}
    plain = answers_of(Rig(**options), mixed_requests(seed))  # type: ignore[arg-type]
    assert answers_of(Rig(drafter=drafter, **options), mixed_requests(seed)) == plain  # type: ignore[arg-type]


def test_right_guesses_save_steps() -> None:
    rig = Rig(drafter=GuessingDrafter(oracle))
    rig.core.add_request(request(max_tokens=40))
    output = rig.run()["r"]
    assert output.token_ids == expected_tokens(list(PROMPT), 40)
    assert output.text == expected_text(PROMPT, 40)
    totals = rig.core.step_totals["decode"]
    assert totals.durations.total < 15
    assert totals.accepted_tokens > 25
    assert totals.output_tokens == totals.sequences + totals.drafted_tokens
    rig.assert_clean()


def test_tokens_of_a_step_leave_together_and_count_one_by_one() -> None:
    rig = Rig(drafter=GuessingDrafter(oracle))
    rig.core.add_request(request(max_tokens=20))
    rig.run()
    deltas = [len(output.token_ids) for result in rig.results for output in result.outputs]
    assert sum(deltas) == 20
    assert max(deltas) > 1


def test_an_ended_sequence_is_forgotten_however_it_ended() -> None:
    drafter = GuessingDrafter(oracle)
    rig = Rig(drafter=drafter)
    for name in ("a", "b", "c"):
        rig.core.add_request(request(name, max_tokens=30, deadline_s=101.0 if name == "c" else float("inf")))
    for _ in range(3):
        rig.step()
    assert len(drafter.known) == 3
    rig.core.abort("a")
    rig.clock.now = 102.0
    rig.run()
    assert not drafter.known
    rig.assert_clean()


def test_an_abort_between_the_halves_of_a_step_leaves_nothing() -> None:
    rig = Rig(drafter=GuessingDrafter(oracle))
    rig.core.add_request(request(max_tokens=30))
    rig.step()
    rig.between_halves = lambda: rig.core.abort("r")
    rig.run()
    rig.assert_clean()


def test_the_prefix_cache_never_has_a_rejected_token() -> None:
    """Every block that is offered under a hash has the KV of the tokens that the hash is of."""
    rig = Rig(drafter=GuessingDrafter(mostly_right(3)), prefix_cache=True)
    asked = request(max_tokens=60)
    rig.core.add_request(asked)
    rig.run()
    tokens = [*PROMPT, *expected_tokens(list(PROMPT), 60)]
    hashes: list[bytes] = []
    extend_block_hashes(hashes, tokens, BLOCK, asked.cache_salt, (len(tokens) - 1) // BLOCK)
    blocks = [rig.core.pool.lookup(one) for one in hashes]
    assert None not in blocks
    assert len(set(blocks)) == len(blocks)
    plain = Rig(prefix_cache=True)
    plain.core.add_request(asked)
    plain.run()
    for block, one in zip(blocks, hashes, strict=True):
        assert block is not None
        same = plain.core.pool.lookup(one)
        assert (rig.runner.pool[block] == plain.runner.pool[same]).all()
    cached = rig.core.pool.counts()
    assert cached.free == cached.total


def test_a_stream_that_was_handed_over_speculates_from_its_first_token() -> None:
    drafter = GuessingDrafter(oracle)
    prefill, decode = Rig(), Rig(drafter=drafter)
    asked = request(max_tokens=25)
    first = hand_over(prefill, decode, asked)
    assert first is not None
    decode.core.admit(1, first)
    decode.core.release_writer(1)
    output = decode.run()["r"]
    assert [first, *output.token_ids] == expected_tokens(list(PROMPT), 25)
    assert decode.core.step_totals["decode"].accepted_tokens > 10
    decode.assert_clean()
    prefill.assert_clean()


def test_nothing_is_drafted_where_the_answer_goes_on_elsewhere() -> None:
    drafter = GuessingDrafter(oracle)
    rig = Rig(drafter=drafter)
    rig.core.add_request(request(prompt=b"x", prefill_only=True))
    rig.run()
    rig.core.release_held("r")
    assert not rig.core.step_totals["decode"].drafted_tokens
    rig.assert_clean()


def test_guesses_take_no_blocks_from_others() -> None:
    """The pool holds the sequence to its last token and no more: it goes on to that, without preemption."""
    tokens = 8 * BLOCK - len(PROMPT)
    rig = Rig(drafter=GuessingDrafter(oracle), num_blocks=8)
    rig.core.add_request(request(max_tokens=tokens))
    output = rig.run()["r"]
    assert output.finish_reason is FinishReason.LENGTH
    assert output.token_ids == expected_tokens(list(PROMPT), tokens)
    rig.assert_clean()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_grammars_hold_position_by_position(seed: int, overlaps: bool) -> None:
    compiler = GrammarCompiler(load_tokenizer("simulated"), Rig().runner.facts)
    grammars = [
        Grammar(regex=r"[a-z]{3,9}(, [a-z]{2,7}){0,4}\."),
        Grammar(
            json_schema='{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
        ),
        Grammar(regex=r"(yes|no|perhaps)"),
    ]
    compiled = [compiler.compile(grammar) for grammar in grammars]

    def asked() -> list[EngineRequest]:
        return [
            request(
                f"r{n}",
                b"q%d-%d" % (n, seed),
                stop=stopping(max_tokens=48, min_tokens=3 * (n % 2)),
                grammar=each,
            )
            for n, each in enumerate(compiled)
        ]

    plain = Rig(overlaps=overlaps)
    expected = answers_of(plain, asked())
    answers = {name: list(output.token_ids) for name, output in plain.outputs.items()}
    prompts = {one.request_id: len(one.token_ids) for one in asked()}
    for guess in (replay(answers, prompts, seed), garbage(seed)):
        rig = Rig(overlaps=overlaps, drafter=GuessingDrafter(guess))
        assert answers_of(rig, asked()) == expected
    assert EOS_TOKEN_ID not in answers["r2"] or answers["r2"][-1] == EOS_TOKEN_ID


def test_right_guesses_within_a_grammar_are_accepted() -> None:
    compiler = GrammarCompiler(load_tokenizer("simulated"), Rig().runner.facts)
    compiled = compiler.compile(Grammar(regex=r"[a-z]{40}"))
    asked = request("r", stop=stopping(max_tokens=48), grammar=compiled)
    plain = Rig()
    expected = answers_of(plain, [asked])
    guess = replay({"r": list(plain.outputs["r"].token_ids)}, {"r": len(PROMPT)}, seed=1)
    rig = Rig(drafter=GuessingDrafter(guess))
    assert answers_of(rig, [asked]) == expected
    assert rig.core.step_totals["decode"].accepted_tokens > 10
