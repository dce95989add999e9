"""What the quality watch knows of one model: standings of its targets, and who is at fault. Pure but for its log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from coordinator.quality.blame import NOBODY, Blame, Standing, blame
from coordinator.quality.judge import Answers, Judge, Verdict
from coordinator.quality.target import Target, targets_of_round
from coordinator.workers.snapshot import WorkerKey
from splitserve.config.coordinator import QualityConfig
from splitserve.logs import log_event

ProbeOutcome = Literal["right", "wrong", "unanswered", "skipped"]


@dataclass(frozen=True, slots=True)
class QualityFigures:
    """What is shown of one model after a round."""

    model: str
    rounds: int = 0
    probes: Mapping[ProbeOutcome, int] = field(default_factory=dict)
    agreement: float = 1.0
    """The least of the last round's answers."""
    kl_nats: float = 0.0
    """The largest of the last round's answers."""
    pair_tolerance_nats: float = 0.0
    decode_tolerance_nats: float = 0.0
    """Of pairs, and of decode workers alone."""
    suspected: Blame = NOBODY
    wrong: Mapping[Target, Verdict] = field(default_factory=dict)
    """The last wrong answers of targets that have not been acquitted since."""


class ModelWatch:
    """Call `begin_round`, send the prompts, `end_round`."""

    def __init__(self, name: str, config: QualityConfig) -> None:
        self.name = name
        self.figures = QualityFigures(name)
        """Replaced whole after each round: scrapes read it on another thread."""
        self._probes: Counter[ProbeOutcome] = Counter()
        self._wrong: dict[Target, Verdict] = {}
        """The last wrong answers of targets that have not been acquitted since."""
        self._judge = Judge(config)
        self._most, self._clean_rounds = config.max_probes, config.clean_rounds
        self._standings: dict[Target, Standing] = {}
        self._turn = 0

    @property
    def suspected(self) -> Blame:
        """Who is at fault if every failure counts at once: what to be alarmed about."""
        return blame({target: standing.suspect for target, standing in self._standings.items()})

    @property
    def condemned(self) -> Blame:
        """Who is at fault by failures in a row: what to isolate. Targets in between count neither way."""
        known = self._standings.items()
        return blame({t: s.condemned for t, s in known if s.condemned or not s.suspect})

    def begin_round(self, targets: Sequence[Target]) -> list[Target]:
        """The targets of the next round, of all that there are. What is known of others is forgotten."""
        here = set(targets)
        for target in [target for target in self._standings if target not in here]:
            del self._standings[target]
            self._wrong.pop(target, None)
        suspects = [target for target, standing in self._standings.items() if standing.suspect]
        chosen = targets_of_round(targets, suspects, self._turn, self._most)
        self._turn += len(chosen)
        return chosen

    def end_round(self, prompt: int, answers: Answers, registered: frozenset[WorkerKey]) -> None:
        """Judges the answers to the prompt of this number; `registered` are the boots that there are."""
        verdicts = self._judge.judge(prompt, answers, registered)
        before = self.suspected
        for target, verdict in verdicts.items():
            standing = self._standings.get(target, Standing())
            self._standings[target] = standing.after(failed=verdict.failed, clean_rounds=self._clean_rounds)
            self._probes["wrong" if verdict.failed else "right"] += 1
            if verdict.failed:
                self._wrong[target] = verdict
                _log_wrong(self.name, target, verdict)
            elif not self._standings[target].suspect:
                self._wrong.pop(target, None)
        self.figures = self._figures_after(verdicts)
        if (found := self.suspected) != before:
            _log_blame(self.name, found)

    def _figures_after(self, verdicts: Mapping[Target, Verdict]) -> QualityFigures:
        compared = [verdict.comparison for verdict in verdicts.values()]
        return replace(
            self.figures,
            rounds=self.figures.rounds + 1,
            probes=dict(self._probes),
            agreement=min((c.agreement for c in compared), default=self.figures.agreement),
            kl_nats=max((c.kl_nats for c in compared), default=self.figures.kl_nats),
            pair_tolerance_nats=self._judge.tolerance_nats(is_pair=True),
            decode_tolerance_nats=self._judge.tolerance_nats(is_pair=False),
            suspected=self.suspected,
            wrong=dict(self._wrong),
        )

    def count_skipped(self) -> None:
        """Counts a target that was busy."""
        self._probes["skipped"] += 1

    def count_unanswered(self) -> None:
        """Counts a target that could not answer."""
        self._probes["unanswered"] += 1


def _log_wrong(model: str, target: Target, verdict: Verdict) -> None:
    log_event(
        "quality.wrong_answer",
        level=logging.WARNING,
        model=model,
        prefill_worker=target.prefill_name,
        decode_worker=target.decode[0],
        kl_nats=round(verdict.comparison.kl_nats, 4),
        tolerance_nats=round(verdict.tolerance_nats, 4),
        agreement=round(verdict.comparison.agreement, 3),
    )


def _log_blame(model: str, found: Blame) -> None:
    log_event(
        "quality.at_fault",
        level=logging.WARNING,
        model=model,
        prefill_workers=[worker_id for worker_id, _ in found.prefills],
        decode_workers=[worker_id for worker_id, _ in found.decodes],
        pairs=[[pair.prefill_name, pair.decode[0]] for pair in found.pairs],
    )
