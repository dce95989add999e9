"""Rounds of golden prompts with workers whose answers a test writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from coordinator.canary import canary
from coordinator.canary.canary import Canary, differs, elect
from coordinator.canary.probe import AnswerToken, Prober
from coordinator.models.tokenizers import PromptTokenizers
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker
from splitserve.config.coordinator import CanaryConfig
from splitserve.errors import SplitserveError, UnavailableError
from splitserve.v1 import registry_pb2
from tests.support.cluster.registrations import registration
from tests.support.engine.word_tokenizer import WordTokenizer

RIGHT = [AnswerToken(5, -0.1, {5: -0.1, 6: -3.0}), AnswerToken(7, -0.5, {7: -0.5, 8: -0.9})]
OTHER_TOKEN = [AnswerToken(6, -0.1, {6: -0.1, 5: -3.0}), RIGHT[1]]
NEAR_TIE = [RIGHT[0], AnswerToken(8, -0.6, {8: -0.6, 7: -0.8})]
LESS_SURE = [RIGHT[0], AnswerToken(7, -1.2, {7: -1.2, 8: -1.4})]


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (RIGHT, False),
        (NEAR_TIE, False),
        (OTHER_TOKEN, True),
        (LESS_SURE, True),
        (RIGHT[:1], True),
        ([AnswerToken(9, 0.0, {}), RIGHT[1]], True),
        ([AnswerToken(5, -math.inf, {}), RIGHT[1]], True),
    ],
)
def test_what_rounding_does_not_explain_is_wrong(answer: Sequence[AnswerToken], wrong: bool) -> None:
    assert differs(RIGHT, answer) is wrong


class Pairs:
    """Prefill workers `p0` and `p1`, and the decode worker `d`, with the answers that a test writes."""

    def __init__(self) -> None:
        self.registry = Registry(5.0)
        self.answers: dict[str, Sequence[AnswerToken] | SplitserveError] = {}
        self.join_decode()
        for name in ("p0", "p1"):
            self.join(name)
        tokenizers = cast("PromptTokenizers", self)
        self.canary = Canary(CanaryConfig(interval_s=1), self.registry, tokenizers, cast("Prober", self))

    def join_decode(self, epoch: int = 1) -> None:
        decode = self.registry.register(registration("d", registry_pb2.POOL_DECODE, epoch=epoch), 0.0)
        self.registry.set_output_open(decode.key, True)
        self.registry.report(registry_pb2.ReportRequest(worker_id="d", epoch=epoch), 0.0)
        self.agent_id = decode.agent_id

    def join(self, name: str, epoch: int = 1) -> None:
        self.registry.register(registration(name, registry_pb2.POOL_PREFILL, epoch=epoch), 0.0)
        report = registry_pb2.ReportRequest(worker_id=name, epoch=epoch, connected_agent_ids=[self.agent_id])
        self.registry.report(report, 0.0)

    async def tokenizer(self, source: str) -> WordTokenizer:
        return WordTokenizer()

    async def ask(self, prefill: Worker, decode: Worker, token_ids: tuple[int, ...]) -> Sequence[AnswerToken]:
        answer = self.answers.get(prefill.worker_id, RIGHT)
        if isinstance(answer, SplitserveError):
            raise answer
        return answer

    async def round(self) -> Mapping[str, float]:
        """The outcomes so far, and the pairs that are wrong now, after one more round."""
        await self.canary.round()
        answers, wrong = self.canary.metrics()
        told = {sample.labels["outcome"]: sample.value for sample in answers.samples}
        return told | {"pairs": wrong.samples[0].value}


async def test_a_pair_whose_answer_changes_raises_an_alarm_until_it_is_right_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(canary, "log_event", lambda event, **fields: logged.append({"event": event} | fields))
    pairs = Pairs()
    for _ in range(2):  # one round for each built-in prompt
        assert (await pairs.round())["pairs"] == 0
    pairs.answers["p1"] = OTHER_TOKEN
    told = await pairs.round()
    assert (told["right"], told["wrong"], told["pairs"]) == (5, 1, 1)
    (event,) = logged
    assert event["event"] == "canary.wrong_answer"
    assert (event["prefill_worker"], event["decode_worker"]) == ("p1", "d")
    assert (event["expected"], event["answered"]) == ([5, 7], [6, 7])
    pairs.answers["p1"] = []  # logits that are not finite
    assert (await pairs.round())["wrong"] == 2
    del pairs.answers["p1"]
    assert (await pairs.round())["pairs"] == 0


async def test_a_failing_pair_says_nothing_about_its_answers() -> None:
    pairs = Pairs()
    pairs.answers["p1"] = UnavailableError("gone", reason="WORKER_LOST")
    told = await pairs.round()
    assert told == {"right": 1, "wrong": 0, "unanswered": 1, "pairs": 0}


async def test_new_boots_have_a_new_reference() -> None:
    pairs = Pairs()
    await pairs.round()
    await pairs.round()
    pairs.answers = dict.fromkeys(("p0", "p1"), OTHER_TOKEN)
    assert (await pairs.round())["pairs"] == 2
    pairs.join_decode(epoch=2)
    for name in ("p0", "p1"):
        pairs.join(name, epoch=2)
    assert (await pairs.round())["pairs"] == 0


def test_the_reference_is_the_answer_that_most_pairs_give() -> None:
    def pair(number: int) -> Any:
        return (("p", number), ("d", number))

    answers = {pair(0): OTHER_TOKEN, pair(1): RIGHT, pair(2): NEAR_TIE, pair(3): []}
    reference, workers = elect(answers)
    assert reference == RIGHT
    assert workers == {("p", 1), ("d", 1), ("p", 2), ("d", 2)}
