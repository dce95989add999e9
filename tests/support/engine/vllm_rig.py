"""An engine of `--engine vllm` without its worker: this process is the engine thread."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from engine.core.engine import ChunkProgress, Engine, RequestOutput
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from tests.support.waiting import PATIENCE_S
from worker.build import EngineParts, build_engine

POLL_S = 0.05


@dataclass
class VllmRig:
    """The engine, and what it has put out so far."""

    parts: EngineParts
    posted: queue.SimpleQueue[Callable[[Engine], object]]
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)
    progress: dict[str, list[ChunkProgress]] = field(default_factory=dict)
    started: dict[str, int] = field(default_factory=dict)
    """Cached tokens of each request that has started."""

    @classmethod
    def of(cls, model: str, config: EngineConfig) -> VllmRig:
        posted: queue.SimpleQueue[Callable[[Engine], object]] = queue.SimpleQueue()
        worker = WorkerConfig(worker_id="w", model=model, engine=config)
        return cls(build_engine(worker, posted.put), posted)

    @property
    def core(self) -> Engine:
        return self.parts.core

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Does what an engine thread does until something holds."""
        end_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end_s, what
            self.step()

    def step(self) -> None:
        """Takes what vLLM has said next, or nothing after POLL_S or at the engine's next deadline."""
        wait_s = min(POLL_S, max(0.0, self.core.next_deadline() - time.monotonic()))
        with suppress(queue.Empty):
            self.posted.get(timeout=wait_s)(self.core)
        self.parts.transport.poll()
        if self.core.has_work():
            self.core.begin_step()
            self.core.finish_step()
        self._take()

    def run(self) -> None:
        """Until no request is live."""
        self.until(lambda: not self._live(), "requests do not end")

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs.get(name, []) for token in output.token_ids]

    def text(self, name: str) -> str:
        return "".join(output.text for output in self.outputs[name])

    def assert_empty(self) -> None:
        """vLLM has all its blocks back."""
        self.run()
        self.until(lambda: self.core.load().free_blocks == self.core.load().total_blocks, "blocks are kept")
        load = self.core.load()
        assert (load.reserved_blocks, load.quarantined_blocks, load.referenced_blocks) == (0, 0, 0)

    def close(self) -> None:
        self.parts.transport.close()
        self.core.close()

    def _live(self) -> int:
        load = self.core.load()
        return load.running_requests + load.waiting_requests

    def _take(self) -> None:
        result = self.core.take_result()
        if result is None:
            return
        self.started |= result.started
        for output in result.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        for progress in result.progress:
            self.progress.setdefault(progress.request_id, []).append(progress)
