"""The load generator, a process of its own: reads one JSON job from stdin, writes one JSON result to stdout.

Requests are sent at their scheduled times whatever became of earlier ones (open loop), each over a connection of its
own and with a deadline. Python's collector is off meanwhile, so that no pause of it delays a request or the time of an
event.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from bench.goodput.mixes import PlannedRequest
from bench.goodput.outcome import Ending, SentRequest
from bench.goodput.wire import Chunk, NotServed, ServedAt, ask, completion_body, parsed

LEAD_S = 0.2
"""From the end of the warm-up to the run's begin, to which the times count."""


@dataclass(frozen=True)
class LoadJob:
    """`warm_up` is sent first, two at a time, and not counted; `timeout_s` is a request's, from its scheduled time."""

    at: ServedAt
    warm_up: Sequence[PlannedRequest]
    requests: Sequence[PlannedRequest]
    timeout_s: float
    targets_ms: tuple[float, float]

    @property
    def longest_s(self) -> float:
        """How long it can last, if nothing is ever answered."""
        waves = (len(self.warm_up) + 1) // 2
        return waves * self.timeout_s + LEAD_S + self.requests[-1].at_s + self.timeout_s


@dataclass(frozen=True)
class LoadResult:
    """`cpu_s`: the generator's CPU time while the load ran, `wall_s` its duration."""

    requests: tuple[SentRequest, ...]
    cpu_s: float
    wall_s: float

    @property
    def lateness_s(self) -> list[float]:
        """How much later than scheduled each request was sent."""
        return [request.sent_s - request.at_s for request in self.requests]


class LoadGenerator:
    """Runs one job."""

    def __init__(self, job: LoadJob) -> None:
        self._job = job
        self._sent: list[tuple[float, list[Chunk], Ending, str]] = [
            (0.0, [], "failed", "not sent") for _ in job.requests
        ]

    async def run(self) -> LoadResult:
        """Warms up, then sends everything, and returns when all are answered or over time.

        Raises RuntimeError if the warm-up is not answered: what does not serve an idle client is set up wrongly, and
        its share would say nothing.
        """
        clock = asyncio.get_running_loop().time
        for number in range(0, len(self._job.warm_up), 2):
            pair = self._job.warm_up[number : number + 2]
            deadline_s = clock() + self._job.timeout_s
            for ending, error in await asyncio.gather(
                *(self._answered(planned, [], deadline_s) for planned in pair)
            ):
                if ending != "complete":
                    raise RuntimeError(f"a request of the warm-up {ending}: {error}")
        begin_s = clock() + LEAD_S
        cpu_s = time.process_time()
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(self._job.requests):
                await asyncio.sleep(begin_s + request.at_s - clock())
                group.create_task(self._send(number, request, begin_s))
        cpu_s, wall_s = time.process_time() - cpu_s, clock() - begin_s
        requests = [self._outcome(number, begin_s) for number in range(len(self._sent))]
        return LoadResult(tuple(requests), round(cpu_s, 3), round(wall_s, 3))

    async def _send(self, number: int, request: PlannedRequest, begin_s: float) -> None:
        sent_s, chunks = asyncio.get_running_loop().time() - begin_s, list[Chunk]()
        deadline_s = begin_s + request.at_s + self._job.timeout_s
        ending, error = await self._answered(request, chunks, deadline_s)
        self._sent[number] = sent_s, chunks, ending, error

    async def _answered(
        self, request: PlannedRequest, chunks: list[Chunk], deadline_s: float
    ) -> tuple[Ending, str]:
        """Sends a request and adds its chunks to the list; how the request ended, and the error."""
        job = self._job
        body = completion_body(job.at, request.prompt, request.output_tokens, job.targets_ms)
        try:
            async with asyncio.timeout_at(deadline_s):
                await ask(job.at, body, chunks)
        except TimeoutError:
            return "timed out", ""
        except NotServed as refusal:
            return ("refused" if refusal.is_refusal else "failed"), str(refusal)
        except (OSError, EOFError, ValueError, LookupError) as broken:
            return "failed", repr(broken)
        return "complete", ""

    def _outcome(self, number: int, begin_s: float) -> SentRequest:
        request = self._job.requests[number]
        sent_s, chunks, ending, error = self._sent[number]
        answer = parsed(chunks)
        if ending == "complete" and (answer.error or answer.tokens != request.output_tokens):
            ending = "failed"
            error = answer.error or f"{answer.tokens} tokens, not {request.output_tokens}"
        return SentRequest(
            request.kind,
            len(request.prompt),
            request.output_tokens,
            at_s=request.at_s,
            sent_s=sent_s,
            event_s=tuple(at_s - begin_s for at_s in answer.event_s),
            tokens=answer.tokens,
            ending=ending,
            error=error,
        )


def job_from_json(text: str) -> LoadJob:
    """The inverse of `json.dumps(asdict(job))`."""
    fields: dict[str, Any] = json.loads(text)
    fields["at"] = ServedAt(**fields["at"])
    for name in ("warm_up", "requests"):
        fields[name] = [PlannedRequest(**planned) for planned in fields[name]]
    fields["targets_ms"] = tuple(fields["targets_ms"])
    return LoadJob(**fields)


def result_from_json(text: str) -> LoadResult:
    """The inverse of `json.dumps(asdict(result))`."""
    fields: dict[str, Any] = json.loads(text)
    return LoadResult(**{**fields, "requests": requests_from(fields["requests"])})


def requests_from(listed: Sequence[dict[str, Any]]) -> tuple[SentRequest, ...]:
    """Requests from the objects that JSON holds."""
    return tuple(SentRequest(**{**request, "event_s": tuple(request["event_s"])}) for request in listed)


def main() -> None:
    """Runs the job that stdin holds, and prints its result."""
    job = job_from_json(sys.stdin.read())
    gc.disable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(asdict(runner.run(LoadGenerator(job).run()))))


if __name__ == "__main__":
    main()
