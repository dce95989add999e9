"""Rows of the report from turns. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, TypeVar

from rich.table import Table

from bench.peers.vllm_pair import VllmPairTurn
from bench.vllm.streams import DecodeTurn

T = TypeVar("T")


@dataclass(frozen=True)
class DecodeCase:
    """What is asked of both systems at once."""

    model: str
    vocabulary: int
    streams: int
    temperature: float


@dataclass(frozen=True)
class TurnPair:
    """Both systems with the same prompts, one right after the other. `other_load`: share of all cores, 0..1."""

    own: DecodeTurn
    vllm: DecodeTurn
    other_load: float


@dataclass(frozen=True)
class DecodeRow:
    """splitserve's decode worker beside vLLM's server; a ratio is splitserve's by vLLM's."""

    model: str
    vocabulary: int
    streams: int
    temperature: float
    repeats: int
    tpot_ms: float
    vllm_tpot_ms: float
    ratio_tpot: float
    tokens_per_s: float
    vllm_tokens_per_s: float
    ratio_throughput: float
    other_load: float


@dataclass(frozen=True)
class CpuRow:
    """CPU microseconds a token, user and system: front ends, engines (`vllm_`: of `vllm serve`), the coordinator."""

    model: str
    vocabulary: int
    streams: int
    temperature: float
    repeats: int
    front_us: float
    vllm_front_us: float
    ratio_front: float
    engine_us: float
    vllm_engine_us: float
    coordinator_us: float
    other_load: float


@dataclass(frozen=True)
class PushHandoffRow:
    """Milliseconds of one request through splitserve's pair and vLLM's push pair; ratios as above."""

    prompt_tokens: int
    repeats: int
    second_token_ms: float
    vllm_second_token_ms: float
    ratio_second_token: float
    ttft_ms: float
    vllm_ttft_ms: float
    ratio_ttft: float
    vllm_prefill_ms: float
    ratio_prefill: float
    equal_tokens: float
    other_load: float


def decode_row(case: DecodeCase, turns: Sequence[TurnPair]) -> DecodeRow:
    """Medians of the turns; a ratio is the median of those of neighbours in time."""
    return DecodeRow(
        **asdict(case),
        repeats=len(turns),
        tpot_ms=_middle(turns, lambda turn: turn.own.tpot_ms),
        vllm_tpot_ms=_middle(turns, lambda turn: turn.vllm.tpot_ms),
        ratio_tpot=_middle(turns, lambda turn: turn.own.tpot_ms / turn.vllm.tpot_ms),
        tokens_per_s=_middle(turns, lambda turn: turn.own.tokens_per_s),
        vllm_tokens_per_s=_middle(turns, lambda turn: turn.vllm.tokens_per_s),
        ratio_throughput=_middle(turns, lambda turn: turn.own.tokens_per_s / turn.vllm.tokens_per_s),
        other_load=_middle(turns, lambda turn: turn.other_load),
    )


def cpu_row(case: DecodeCase, turns: Sequence[TurnPair]) -> CpuRow:
    """Medians of the turns, as of `decode_row`."""
    return CpuRow(
        **asdict(case),
        repeats=len(turns),
        front_us=_middle(turns, lambda turn: turn.own.cpu_us["front"]),
        vllm_front_us=_middle(turns, lambda turn: turn.vllm.cpu_us["front"]),
        ratio_front=_middle(turns, lambda turn: turn.own.cpu_us["front"] / turn.vllm.cpu_us["front"]),
        engine_us=_middle(turns, lambda turn: turn.own.cpu_us["engine"]),
        vllm_engine_us=_middle(turns, lambda turn: turn.vllm.cpu_us["engine"]),
        coordinator_us=_middle(turns, lambda turn: turn.own.cpu_us["coordinator"]),
        other_load=_middle(turns, lambda turn: turn.other_load),
    )


def handoff_row(prompt_tokens: int, turns: Sequence[VllmPairTurn]) -> PushHandoffRow:
    """Medians of the turns, as of `decode_row`. `equal_tokens` is a mean."""

    def own_second(turn: VllmPairTurn) -> float:
        return turn.splitserve.second_ms

    def vllm_second(turn: VllmPairTurn) -> float:
        # vLLM's decode server repeats the first token.
        return turn.vllm.handoff_ms + turn.vllm.second_ms

    return PushHandoffRow(
        prompt_tokens=prompt_tokens,
        repeats=len(turns),
        second_token_ms=_middle(turns, own_second),
        vllm_second_token_ms=_middle(turns, vllm_second),
        ratio_second_token=_middle(turns, lambda turn: own_second(turn) / vllm_second(turn)),
        ttft_ms=_middle(turns, lambda turn: turn.splitserve.ttft_ms),
        vllm_ttft_ms=_middle(turns, lambda turn: turn.vllm.ttft_ms),
        ratio_ttft=_middle(turns, lambda turn: turn.splitserve.ttft_ms / turn.vllm.ttft_ms),
        vllm_prefill_ms=_middle(turns, lambda turn: turn.vllm.prefill_ms),
        ratio_prefill=_middle(turns, lambda turn: turn.splitserve.ttft_ms / turn.vllm.prefill_ms),
        equal_tokens=round(fmean(turn.equal_tokens for turn in turns), 3),
        other_load=_middle(turns, lambda turn: turn.other_load),
    )


def table(title: str, rows: Sequence[Any]) -> Table:
    """Rows of one kind, a column for each field."""
    shown = Table(title=title)
    names = tuple(asdict(rows[0]))
    for name in names:
        shown.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        shown.add_row(*(str(value) for value in asdict(row).values()))
    return shown


def _middle(turns: Sequence[T], figure: Callable[[T], float]) -> float:
    return round(median(figure(turn) for turn in turns), 3)
