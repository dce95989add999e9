"""Counters of a load generator, and CPU time and memory of the process under load."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import psutil

from bench.front_door.scripted_workers import CLOCK_MASK

STAMP = re.compile(r" ([0-9a-f]{6})")
LATEST_US = 10_000_000
"""Larger ages do not come from our time stamps."""


class ProcessMeter:
    """CPU time and memory of one process, its threads and children included."""

    def __init__(self, pid: int) -> None:
        process = psutil.Process(pid)
        self._family = [process, *process.children(recursive=True)]

    def cpu_s(self) -> float:
        """User and system time since its start. Seconds."""
        return float(sum(sum(member.cpu_times()[:2]) for member in self._family))

    def rss_bytes(self) -> int:
        """Resident memory."""
        return int(sum(member.memory_info().rss for member in self._family))


@dataclass
class Tally:
    """Counts of one window; `begin` starts it, `result` ends it."""

    meter: ProcessMeter
    counting: bool = False
    tokens: int = 0
    messages: int = 0
    requests: int = 0
    reported_tokens: int = 0
    """Completion tokens that the server itself reported, over the requests that ended in the window."""
    ages_us: list[int] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    awaited: int = 0
    """Number of first tokens that sets `reached`."""
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> None:
        """Starts the window."""
        self.counting = True
        self._cpu_s, self._since_s = self.meter.cpu_s(), time.monotonic()

    def text(self, text: str, tokens: int = 1) -> None:
        """Counts a message with text: one token per time stamp, or `tokens` without any."""
        if not self.counting:
            return
        stamps = STAMP.findall(text)
        self.messages += 1
        self.tokens += len(stamps) or tokens
        if stamps:
            now_us = time.monotonic_ns() // 1000
            ages = [(now_us - int(stamp, 16)) & CLOCK_MASK for stamp in stamps]
            self.ages_us += [age for age in ages if age < LATEST_US]

    def ended(self, reported_tokens: int) -> None:
        """Counts a complete request."""
        if self.counting:
            self.requests += 1
            self.reported_tokens += reported_tokens

    def began(self, asked_s: float) -> None:
        """Counts a first token."""
        if self.counting:
            self.ttft_s.append(time.monotonic() - asked_s)
            if len(self.ttft_s) == self.awaited:
                self.reached.set()

    def result(self) -> dict[str, Any]:
        """The figures of the window up to now."""
        wall_s, cpu_s = time.monotonic() - self._since_s, self.meter.cpu_s() - self._cpu_s
        ages_ms = np.array(self.ages_us or [0]) / 1e3
        ttft_ms = np.array(self.ttft_s or [0]) * 1e3
        return {
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "cpu_share": cpu_s / wall_s,
            "tokens": self.tokens,
            "messages": self.messages,
            "requests": self.requests,
            "reported_tokens": self.reported_tokens,
            "tokens_per_s": self.tokens / wall_s,
            "requests_per_s": self.requests / wall_s,
            "tokens_per_message": self.tokens / max(1, self.messages),
            "cpu_us_per_token_all": 1e6 * cpu_s / max(1, self.tokens),
            "age_ms": {str(p): float(np.percentile(ages_ms, p)) for p in (50, 99)},
            "ttft_ms": {str(p): float(np.percentile(ttft_ms, p)) for p in (50, 99)},
        }


class LoadConnection(Protocol):
    """A connection of a load generator."""

    broken: asyncio.Future[None]
    """Ends with the connection's error."""

    def close(self) -> None:
        """Closes it."""


async def until_broken(connections: Sequence[LoadConnection]) -> None:
    """Waits until one breaks, whose error it raises; closes all, also when cancelled."""
    try:
        await asyncio.gather(*(connection.broken for connection in connections))
    finally:
        for connection in connections:
            connection.close()
