"""What vLLM loads with tensor parallelism: the connector, here and in each rank, and each rank's logits processor."""

from __future__ import annotations

import ctypes
import os
import signal
from functools import cache, partial
from typing import Any

import torch
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from engine.vllm.bridge import open_bridge
from engine.vllm.kv_memory import block_order, kv_region
from engine.vllm.plugins import SplitserveConnector, row_key
from engine.vllm.ranks.rank_group import SOCKET_FIELD, TRANSPORT_FIELD, WORKER_FIELD
from engine.vllm.ranks.rank_link import RankLink
from engine.vllm.ranks.rank_transport import RankTransport
from engine.vllm.ranks.sampling_service import NO_TOKEN
from kv_transfer.transports import make_transport
from splitserve.v1 import ranks_pb2 as pb

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


class StepReports(KVConnectorMetadata):
    """What the ranks report to vLLM in a step: ids of requests that were sent, and that were received."""

    def __init__(self, sent: set[str], received: set[str]) -> None:
        self.sent = sent
        self.received = received


class RankedConnector(SplitserveConnector):
    """Scheduler side on the engine thread, worker side in each rank."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if role is KVConnectorRole.WORKER:
            _die_with_worker(_extra(vllm_config)[WORKER_FIELD])
            open_bridge()  # an empty one: requests are known on the engine thread
        super().__init__(vllm_config, role, kv_cache_config)

    @override
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Takes what is to be reported to the ranks."""
        super().build_connector_meta(scheduler_output)
        return StepReports(*self._bridge.take_reports())

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Registers the rank's KV with a transport, which the worker then commands."""
        extra = _extra(self._vllm_config)
        import vllm

        version = f"vllm-{vllm.__version__}"
        memory = kv_region(kv_caches, "", block_order(self._vllm_config, kv_caches), version)
        rank = get_tensor_model_parallel_rank()
        link = RankLink.to_worker(extra[SOCKET_FIELD], rank, pb.RANK_CHANNEL_KV)
        RankTransport(link, partial(make_transport, extra[TRANSPORT_FIELD]), memory).start()

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Every rank reports the same."""
        reports = self._get_connector_metadata()
        assert isinstance(reports, StepReports)
        return reports.sent or None, reports.received or None


class RankSamplingProcessor(LogitsProcessor):
    """Leaves vLLM no choice of tokens, as `SamplingProcessor`; they are chosen on the engine thread's side."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._keys: dict[int, str] = {}
        self._rank = get_tensor_model_parallel_rank()
        self._link = _sampling_link(_extra(vllm_config)[SOCKET_FIELD], self._rank)

    def is_argmax_invariant(self) -> bool:
        """No: it chooses the token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the rows of vLLM's batch."""
        process_dict_updates(self._keys, batch_update, lambda params, prompt, output: row_key(params))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Raises the chosen token of each row above all others. `logits`: float32 `[rows, vocabulary]`."""
        if not self._keys:  # vLLM's own warm-up, in all ranks alike
            return logits
        if self._rank == 0:
            rows, vocabulary_size = logits.shape
            keys = [self._keys.get(index, "") for index in range(rows)]
            self._link.send(pb.RankLogits(keys=keys, vocabulary_size=vocabulary_size))
            self._link.send_bytes(memoryview(logits.cpu().contiguous().numpy()).cast("B"))
        for index, token in enumerate(self._link.receive(pb.RankTokens).tokens):
            if token != NO_TOKEN:
                logits[index, token] = float("inf")
        return logits


@cache
def _sampling_link(path: str, rank: int) -> RankLink:
    """One link a process, however often vLLM makes a logits processor."""
    return RankLink.to_worker(path, rank, pb.RANK_CHANNEL_SAMPLING)


def _extra(vllm_config: Any) -> dict[str, Any]:
    extra: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
    return extra


def _die_with_worker(pid: int) -> None:
    """The kernel ends this process with its worker: once that has ended, nothing of it writes KV any more."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != pid:
        os._exit(1)
