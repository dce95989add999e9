"""The file of a recording: JSON lines in Mooncake's trace format, with a head, and the workers at the end."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from splitserve.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.v1 import scaling_pb2, traffic_pb2

FORMAT = 1
BLOCK_TOKENS = 512


class RecordingFile:
    """Writes a recording, a line as soon as its request has ended, so that one that breaks off can be used.

    Raises FailedPreconditionError for a file that is there, unless `force`, and InvalidArgumentError for one that
    cannot be written.
    """

    def __init__(self, path: Path, seconds: float, *, force: bool = False) -> None:
        self._path, self._requests = path, 0
        try:
            self._file = path.open("w" if force else "x", encoding="utf-8")
        except FileExistsError:
            message = f"out: {path} is there already; --force replaces it"
            raise FailedPreconditionError(message, reason="FILE_EXISTS", field="out") from None
        except OSError as error:
            raise InvalidArgumentError(f"out: cannot write {path}: {error.strerror}", field="out") from None
        started = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._line(
            {"recording": FORMAT, "started": started, "seconds": seconds, "block_tokens": BLOCK_TOKENS}
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if error is not None and not self._requests:
            self._path.unlink(missing_ok=True)  # nothing came: leave nothing that would be in the way

    def add(self, request: traffic_pb2.RecordedRequest, at_s: float) -> None:
        """Writes a request that arrived `at_s` seconds after the beginning."""
        self._requests += 1
        self._line(request_line(request, at_s))

    def end(self, workers: Sequence[scaling_pb2.WorkerSignals]) -> None:
        """Writes what the workers report of themselves: what an engine model is fitted from."""
        self._line({"workers": [worker_line(worker) for worker in workers]})

    def _line(self, content: dict[str, Any]) -> None:
        self._file.write(json.dumps(content, separators=(",", ":")) + "\n")
        self._file.flush()


def request_line(request: traffic_pb2.RecordedRequest, at_s: float) -> dict[str, Any]:
    """One request; the first four keys are those of Mooncake's traces."""
    return {
        "timestamp": round(at_s * 1e3, 3),
        "input_length": request.prompt_tokens,
        "output_length": request.output_tokens,
        "hash_ids": list(request.block_hashes),
        "max_output_length": request.max_output_tokens,
        "model": request.model,
        "tenant": f"{request.tenant_hash:012x}",
        "outcome": request.outcome,
        "ttft_ms": round(request.ttft_ms, 3) if request.HasField("ttft_ms") else None,
        "tpot_ms": round(request.tpot_ms, 3),
        "wait_ms": round(request.wait_ms, 3),
        "prefill_queue_ms": round(request.prefill_queue_ms, 3),
        "prefill_compute_ms": round(request.prefill_compute_ms, 3),
        "prefill_chunks": request.prefill_chunks,
        "cached_tokens": request.cached_tokens,
        "handoff_ms": round(request.handoff_ms, 3),
    }


def worker_line(worker: scaling_pb2.WorkerSignals) -> dict[str, Any]:
    """A worker's own figures."""
    load = worker.load
    fit = load.step_fit if load.HasField("step_fit") else None
    return {
        "pool": "prefill" if worker.pool == 1 else "decode",
        "kv_capacity_tokens": worker.kv_capacity_tokens,
        "kv_bytes_per_token": worker.kv_bytes_per_token,
        "max_running_requests": worker.max_running_requests,
        "max_step_tokens": worker.max_step_tokens,
        "lane_gb_per_second": worker.lane_gb_per_second if worker.HasField("lane_gb_per_second") else None,
        "prefill_tokens_per_second": load.prefill_tokens_per_second,
        "decode_step_ms": load.decode_step_ms,
        "step_fit": None
        if fit is None
        else {
            "base_ms": fit.base_ms,
            "sequence_ms": fit.sequence_ms,
            "context_token_ms": fit.context_token_ms,
        },
    }
