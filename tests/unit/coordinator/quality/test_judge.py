"""References are elected by what most agree on; the tolerance follows the noise of clean rounds, within its bounds."""

from __future__ import annotations

import math

import pytest

from coordinator.quality.golden_answer import MOST_NATS, GoldenAnswer, GoldenToken
from coordinator.quality.judge import Judge, elect
from coordinator.quality.target import Target
from coordinator.workers.snapshot import WorkerKey
from splitserve.config.coordinator import QualityConfig
from splitserve.errors import ConfigError

CONFIG = QualityConfig(policy="alarm", min_tolerance_nats=0.02, max_tolerance_nats=0.5)
P0, P1, D0, D1 = ("p0", 1), ("p1", 1), ("d0", 1), ("d1", 1)
EVERYBODY = frozenset({P0, P1, D0, D1})
ALONE = [Target(None, D0), Target(None, D1)]
PAIRS = [Target(p, d) for p in (P0, P1) for d in (D0, D1)]


def leaning(share: float) -> GoldenAnswer:
    """An answer whose token 1 has this probability at each position."""
    top = {1: math.log(share), 2: math.log(1 - share)}
    return tuple(GoldenToken(1 if share >= 0.5 else 2, top) for _ in range(8))


RIGHT, WRONG, OTHER = leaning(0.9), leaning(0.1), leaning(0.02)


def by(targets: list[Target], answer: GoldenAnswer) -> dict[Target, GoldenAnswer | None]:
    return dict.fromkeys(targets, answer)


def failed(judge: Judge, answers: dict[Target, GoldenAnswer | None], prompt: int = 0) -> set[Target]:
    verdicts = judge.judge(prompt, answers, EVERYBODY)
    return {target for target, verdict in verdicts.items() if verdict.failed}


@pytest.mark.parametrize("bad", [P0, P1, D1])
def test_the_first_round_already_finds_who_is_wrong(bad: WorkerKey) -> None:
    answers = by(ALONE + PAIRS, RIGHT)
    wrong = {target for target in PAIRS if bad in target.workers}
    assert failed(Judge(CONFIG), answers | by(list(wrong), WRONG)) == wrong


def test_a_decode_worker_that_computes_wrongly_does_not_become_the_reference() -> None:
    # Its pairs' first tokens come from right prefill workers, so they do not agree with it either.
    top = RIGHT[0].top
    pair = (GoldenToken(1, top), *WRONG[1:])
    answers = by(ALONE + PAIRS, RIGHT) | {ALONE[0]: WRONG} | by([PAIRS[0], PAIRS[2]], pair)
    assert failed(Judge(CONFIG), answers) == {ALONE[0], PAIRS[0], PAIRS[2]}


def test_where_pairs_disagree_with_decode_workers_alone_these_are_believed() -> None:
    assert failed(Judge(CONFIG), by(ALONE, RIGHT) | by(PAIRS, WRONG)) == set(PAIRS)
    one = {ALONE[0]: RIGHT, PAIRS[0]: WRONG}
    assert failed(Judge(CONFIG), one) == {PAIRS[0]}


def test_one_answer_elects_nothing() -> None:
    assert elect({ALONE[0]: RIGHT, PAIRS[0]: None}, 0.5) is None
    judge = Judge(CONFIG)
    assert not judge.judge(0, {PAIRS[0]: RIGHT}, EVERYBODY)
    assert failed(judge, by(ALONE, RIGHT)) == set(), "the next round elects"


def test_without_decode_workers_alone_pairs_elect() -> None:
    assert failed(Judge(CONFIG), by(PAIRS[:3], RIGHT) | by(PAIRS[3:], WRONG)) == {PAIRS[3]}


def test_the_reference_stays_when_all_turn_wrong_together() -> None:
    judge = Judge(CONFIG)
    assert not failed(judge, by(ALONE + PAIRS, RIGHT))
    assert failed(judge, by(ALONE + PAIRS, WRONG)) == {*ALONE, *PAIRS}
    assert not failed(judge, by(ALONE + PAIRS, WRONG), prompt=1), "of another prompt nothing is known yet"


def test_new_boots_elect_anew_once_all_electors_are_gone() -> None:
    judge = Judge(CONFIG)
    judge.judge(0, by(ALONE, RIGHT), EVERYBODY)
    new = [Target(None, ("d0", 2)), Target(None, ("d1", 2))]
    some = judge.judge(0, by(new, WRONG), frozenset({D0, ("d1", 2)}))
    assert all(verdict.failed for verdict in some.values())
    none = judge.judge(0, by(new, WRONG), frozenset({("d0", 2), ("d1", 2)}))
    assert not any(verdict.failed for verdict in none.values())


def test_logits_that_are_not_finite_fail() -> None:
    verdicts = Judge(CONFIG).judge(0, by(ALONE, RIGHT) | {PAIRS[0]: None}, EVERYBODY)
    assert verdicts[PAIRS[0]].failed
    assert verdicts[PAIRS[0]].comparison.kl_nats == MOST_NATS


def test_the_tolerance_follows_the_noise_of_pairs_and_not_of_decode_workers_alone() -> None:
    judge = Judge(CONFIG)
    narrow = leaning(0.85)  # a divergence of 0.0093: what narrow KV may do to all pairs alike
    assert not failed(judge, by(ALONE, RIGHT) | by(PAIRS, narrow))
    assert judge.tolerance_nats(is_pair=True) == pytest.approx(0.1, abs=0.02)
    assert judge.tolerance_nats(is_pair=False) == CONFIG.min_tolerance_nats
    assert failed(judge, by([*ALONE, *PAIRS[:3]], narrow) | by(PAIRS[3:], leaning(0.6))) == {PAIRS[3]}
    assert failed(judge, {ALONE[0]: leaning(0.8)}) == {ALONE[0]}


def test_no_noise_raises_the_tolerance_beyond_its_bound() -> None:
    judge = Judge(CONFIG)
    for share in (0.85, 0.8, 0.7, 0.6, 0.5):
        for _ in range(50):
            judge.judge(0, by(ALONE, RIGHT) | by(PAIRS, leaning(share)), EVERYBODY)
    assert judge.tolerance_nats(is_pair=True) == CONFIG.max_tolerance_nats
    assert failed(judge, by(PAIRS, WRONG)) == set(PAIRS)


def test_tolerances_that_contradict_each_other_are_refused() -> None:
    with pytest.raises((ConfigError, ValueError), match="min_tolerance_nats"):
        QualityConfig(min_tolerance_nats=0.5, max_tolerance_nats=0.1)
