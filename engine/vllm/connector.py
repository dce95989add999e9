"""The KV connector that vLLM loads in its scheduler's process and in each rank.

It is vLLM's own push connector (`NixlPushConnector`), which knows the layouts of all models, with three changes. Peers
are those that splitserve's registry names, not those that a port of ours is asked for. The worker says which blocks are
written where, and when a request's KV has come or its blocks are free. And nothing that a peer sends is acted on here:
notifications go to the worker, whose reservation table checks them.

An exception in any of vLLM's calls ends its engine, and so does reporting a request twice.
"""

from __future__ import annotations

import base64
import ctypes
import logging
import os
import signal
import threading
import time
from binascii import Error as NoBase64
from functools import partial
from itertools import product
from typing import Any

import msgspec
import torch
from typing_extensions import override
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPushConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlAgentMetadata,
    NixlHandshakePayload,
    RemoteMeta,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

from engine.vllm.first_token import given_tokens
from engine.vllm.links import VllmEndedError, VllmLink
from splitserve.v1 import vllm_pb2 as pb

SOCKET_FIELD = "splitserve_socket"
"""Where the worker's socket stands in the extra configuration of the connector."""
AWAITS_FIELD, HOLD_FIELD, PRIOR_FIELD = "splitserve_awaits_kv", "splitserve_hold", "splitserve_prior"
"""In a request's `kv_transfer_params`: a peer writes its KV; its blocks are kept at its end; how many of its prompt's
last tokens are output of earlier attempts."""
HELD_FIELD = "splitserve_held"
"""In the `kv_transfer_params` of a finished output: the blocks that are kept, one list a group of layers."""
BUSY_POLL_S = 0.0005
IDLE_POLL_S = 0.1
PART = b"-"
"""The notification of a write that is a part of a handoff: it says nothing."""
YIELD_S = 0.0001
TAKEN_BACK = 4
"""What vLLM subtracts from a generator's offset to take a draw back."""
_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
_ENDED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)

logger = logging.getLogger(__name__)


class SplitserveConnector(NixlPushConnector):
    """What vLLM instantiates, once in each process."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        _die_with_parent()
        if current_platform.is_cpu():
            # Processes of vLLM's wait for each other by yielding, which keeps others off the cores that compute.
            shm_broadcast.sched_yield = partial(time.sleep, YIELD_S)
        self.connector_scheduler = self.connector_worker = None
        if role is KVConnectorRole.SCHEDULER:
            self.connector_scheduler = SchedulerSide(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = RankSide(vllm_config, self.engine_id, kv_cache_config)

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Reports what the worker has told this rank to report."""
        assert isinstance(self.connector_worker, RankSide)
        return self.connector_worker.take_reports(finished_req_ids)

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """The same, for callers of vLLM's older interface."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    @override
    def get_block_ids_with_load_errors(self) -> set[int]:
        """None: a request whose KV does not come is aborted by the worker."""
        return set()

    @override
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to do: peers write."""

    @override
    def wait_for_save(self) -> None:
        """Nothing to do: KV is sent straight from where it is computed."""


class SchedulerSide(NixlPushConnectorScheduler):
    """In the process of vLLM's scheduler: tells the worker which blocks are allocated, and keeps those that are
    sent."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        hello = pb.VllmHello(scheduler=pb.VllmScheduler())
        self._link = VllmLink.to_worker(_socket_of(vllm_config), hello)
        self._held: set[str] = set()

    @override
    def on_new_request(self, request: Any) -> None:
        """Nothing to do: nobody's lease is renewed."""

    @override
    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """Opens no port: the ranks tell the worker themselves."""

    @override
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All tokens of a request that awaits its KV come from a peer. A second question, after a preemption, gets 0:
        the KV is then computed here."""
        params = request.kv_transfer_params or {}
        if prior := params.pop(PRIOR_FIELD, 0):
            _advance_grammar(request, prior)
        if not params.get(AWAITS_FIELD):
            return 0, False
        return request.num_tokens - num_computed_tokens, True

    @override
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Tells the worker which blocks a peer may write."""
        params = request.kv_transfer_params or {}
        if not params.get(AWAITS_FIELD) or num_external_tokens <= 0:
            return
        params[AWAITS_FIELD] = False
        groups = self.get_exchange_clipped_blocks(blocks.get_unhashed_block_ids_all_groups())
        allocated = pb.VllmAllocated(
            request_id=request.request_id,
            blocks=[block for group in groups for block in group],
            group_blocks=[len(group) for group in groups],
            cached_tokens=request.num_tokens - num_external_tokens,
        )
        self._link.send(pb.VllmEvent(allocated=allocated))

    @override
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Empty: the ranks are told by the worker."""
        return KVConnectorMetadata()

    @override
    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Keeps the blocks of a prompt that was computed for a peer until the worker says that they were sent."""
        params = request.kv_transfer_params or {}
        held = bool(params.get(HOLD_FIELD)) and request.status in _ENDED
        self._link.send(pb.VllmEvent(ended=pb.VllmEnded(request_id=request.request_id, held=held)))
        if not held:
            return False, None
        self._held.add(request.request_id)
        return True, {HELD_FIELD: [list(group) for group in self.get_exchange_clipped_blocks(block_ids)]}

    @override
    def has_pending_push_work(self) -> bool:
        """Whether vLLM must go on with empty steps, so that it hears of blocks that were sent."""
        return bool(self._held)

    @override
    def update_connector_output(self, connector_output: Any) -> None:
        """The ranks have reported."""
        self._held.difference_update(connector_output.finished_sending or ())

    @override
    def shutdown(self) -> None:
        super().shutdown()
        self._link.close()


class RewindingGenerator(torch.Generator):
    """A request's generator on cpu. For each chunk of a prompt but the last one vLLM draws a token, drops it, and takes
    the draw back by the generator's offset. PyTorch's generators have offsets on GPUs only; without them a seed and a
    prompt of two chunks end vLLM. All draws that are taken back are before the answer's first one."""

    @override
    def get_offset(self) -> int:
        """Of the draw that is taken back next."""
        return TAKEN_BACK

    @override
    def set_offset(self, offset: int) -> None:
        """Goes back to where the seed begins. A preempted answer is a fresh draw from there on."""
        self.manual_seed(self.initial_seed())


class RankSide(NixlPushConnectorWorker):
    """In each rank: a thread carries out the worker's commands and passes on what NIXL brings."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        # vLLM's settings give NIXL a progress thread, which takes a core for itself: the thread below polls.
        config = base_worker.nixl_agent_config
        base_worker.nixl_agent_config = partial(config, enable_prog_thread=False)
        cores = os.sched_getaffinity(0)
        try:
            super().__init__(vllm_config, engine_id, kv_cache_config)
        finally:
            base_worker.nixl_agent_config = config
            # On cpu vLLM pins this thread, which computes, to the last core that it sees, in all of its processes.
            os.sched_setaffinity(0, cores)
        if current_platform.is_cpu():
            torch.Generator = RewindingGenerator
        self._socket = _socket_of(vllm_config)
        self._link: VllmLink | None = None
        self._lock = threading.Lock()
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._keys: dict[str, str] = {}
        """The keys of requests whose first token is given, by request id."""
        self._awaiting = False

    @override
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Registers the KV with NIXL and tells the worker where it lies."""
        NixlBaseConnectorWorker.register_kv_caches(self, kv_caches)
        rank = pb.VllmRank(
            index=get_pp_group().rank_in_group * self.world_size + self.tp_rank,
            agent_id=self.nixl_wrapper.name,
            handshake=msgspec.msgpack.encode(self.xfer_handshake_metadata),
            base_address=self.kv_caches_base_addr[self.engine_id][self.tp_rank][0],
            device_index=max(0, self.device_id),
            axis_order=_axis_order(self.vllm_config, self.backend_name),
        )
        self._link = VllmLink.to_worker(self._socket, pb.VllmHello(rank=rank))
        threading.Thread(target=self._serve, args=(self._link,), name="splitserve-kv", daemon=True).start()

    def take_reports(self, finished: set[str]) -> KVConnectorTransferResults:
        """What to report in this step. `finished`: requests that ended since the last one."""
        for request_id in finished & self._keys.keys():
            given_tokens.pop(self._keys.pop(request_id), None)
        with self._lock:
            sent, self._sent = self._sent, set()
            received, self._received = self._received, set()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received)

    @override
    def shutdown(self) -> None:
        if self._link is not None:
            self._link.close()
        super().shutdown()

    def _serve(self, link: VllmLink) -> None:
        if not current_platform.is_cpu():
            current_platform.set_device(self.device_id)
        try:
            while True:
                busy = self._awaiting or bool(self._sending_transfers)
                if link.poll(BUSY_POLL_S if busy else IDLE_POLL_S):
                    self._carry_out(link, link.receive(pb.VllmCommand))
                self._tell_writes(link)
                self._tell_notifications(link)
        except VllmEndedError:
            return  # the worker ends, or has ended, and the kernel ends this process with it

    def _carry_out(self, link: VllmLink, command: pb.VllmCommand) -> None:
        match command.WhichOneof("kind"):
            case "connect":
                error = ""
                try:
                    self._connect(command.connect)
                except Exception as caught:
                    error = f"{type(caught).__name__}: {caught}"
                link.send(pb.VllmEvent(reply=pb.VllmReply(error=error)))
            case "disconnect":
                self._disconnect(command.disconnect)
            case "write":
                self._write(link, command.write)
            case "notify":
                self._notify(command.notify)
            case "reports":
                self._report(command.reports)
            case "awaiting":
                self._awaiting = command.awaiting

    def _connect(self, peer: pb.VllmConnect) -> None:
        assert self.transfer_topo is not None
        decoder = msgspec.msgpack.Decoder(NixlHandshakePayload)
        agents: dict[tuple[int, int], str] = {}
        size = peer.tensor_parallel_size
        stages = len(peer.handshakes) // size
        for stage, rank in product(range(stages), self.transfer_topo.handshake_target_ranks(size, 1)):
            payload = decoder.decode(peer.handshakes[stage * size + rank])
            metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
            if metadata.engine_id != peer.engine_id:
                raise ValueError(f"it says that its engine is {metadata.engine_id}, not {peer.engine_id}")
            self._validate_remote_parallel_config(metadata)
            if stages > 1:  # a peer whose layers lie in several ranks writes here, and is never written to
                agents[stage, rank] = self.nixl_wrapper.add_remote_agent(metadata.agent_metadata)
            else:
                agents[stage, rank] = self.add_remote_agent(metadata, rank, size, metadata.dcp_size)
        self._remote_agents[peer.engine_id] = agents

    def _disconnect(self, engine_id: str) -> None:
        if engine_id in self._remote_agents:
            try:
                self._cleanup_remote_engine(engine_id)
            except Exception:
                logger.exception("splitserve: engine %s cannot be disconnected", engine_id)

    def _write(self, link: VllmLink, write: pb.VllmWrite) -> None:
        """Posts a write unless it is too late. All of vLLM's checks come before the first part is posted."""
        name, error, in_doubt = str(write.handle), "", False
        if time.monotonic_ns() >= write.post_before_ns:
            error = "the rank was stopped for too long"
        elif write.engine_id not in self._remote_agents:
            error = "the peer is not connected"
        else:
            local, remote = (
                _groups(blocks, write.group_blocks) for blocks in (write.local_blocks, write.remote_blocks)
            )
            told = base64.b64encode(write.notification) if write.notification else PART
            target = RemoteMeta(remote, "", 0, write.engine_id, told.decode())
            physical = self._logical_to_kernel_block_ids(local, self._physical_blocks_per_logical_kv_block)
            try:
                self._xfer_blocks_for_req(name, ReqMeta(local, physical, self.world_size, remote=target))
            except Exception as caught:
                error, in_doubt = f"{type(caught).__name__}: {caught}", True
            if name in self._send_failures:
                error, in_doubt = "NIXL cannot post it", True
            elif not error and name not in self._sending_transfers:
                error = "vLLM found nothing to write"
        if error:
            self._send_failures.discard(name)
            self._sending_transfers.pop(name, None)
            ended = pb.VllmWriteEnded(handle=write.handle, error=error, in_doubt=in_doubt)
            link.send(pb.VllmEvent(write_ended=ended))

    def _notify(self, told: pb.VllmNotify) -> None:
        agents = self._remote_agents.get(told.engine_id)
        if agents:
            try:
                message = base64.b64encode(told.notification) + b":1"
                self.nixl_wrapper.send_notif(next(iter(agents.values())), notif_msg=message)
            except Exception:
                logger.exception("splitserve: engine %s cannot be notified", told.engine_id)

    def _report(self, reports: pb.VllmReports) -> None:
        for received in reports.received:
            if received.HasField("first_token"):
                given_tokens[received.key] = received.first_token
                self._keys[received.request_id] = received.key
        with self._lock:
            self._sent.update(reports.sent)
            self._received.update(received.request_id for received in reports.received)

    def _tell_writes(self, link: VllmLink) -> None:
        if not self._sending_transfers:
            return
        done, failed = self._pop_done_transfers(self._sending_transfers)
        self._send_failures |= failed
        for name in done:
            error = "NIXL reports an error" if name in self._send_failures else ""
            self._send_failures.discard(name)
            ended = pb.VllmWriteEnded(handle=int(name), error=error, in_doubt=bool(error))
            link.send(pb.VllmEvent(write_ended=ended))

    def _tell_notifications(self, link: VllmLink) -> None:
        for agent_id, messages in self.nixl_wrapper.get_new_notifs().items():
            name = agent_id.decode() if isinstance(agent_id, bytes) else agent_id
            for message in messages:
                text = message.rpartition(b":")[0]
                if text == PART:
                    continue
                try:
                    said = base64.b64decode(text, validate=True)
                except NoBase64:
                    said = message  # the worker counts it as malformed
                notified = pb.VllmNotified(agent_id=name, notification=said)
                link.send(pb.VllmEvent(notified=notified))


def _advance_grammar(request: Any, prior: int) -> None:
    """Lets a request's grammar take the output of earlier attempts, which its prompt ends with."""
    structured = request.structured_output_request
    if structured is not None and structured.grammar is not None:
        structured.grammar.accept_tokens(request.request_id, list(request.all_token_ids[-prior:]))


def _groups(blocks: Any, counts: Any) -> tuple[list[int], ...]:
    groups: list[list[int]] = []
    begin = 0
    for count in counts:
        groups.append(list(blocks[begin : begin + count]))
        begin += count
    return tuple(groups)


def _axis_order(vllm_config: Any, backend: str) -> str:
    """How the kernels of an attention backend read a block: opaque, so the backend's name, and on cpu the instructions
    that a block was packed for."""
    name = f"vllm:{backend.lower()}"
    if current_platform.is_cpu():
        layers = vllm_config.compilation_config.static_forward_context.values()
        packed = sorted({str(vars(layer)["isa"]) for layer in layers if "isa" in vars(layer)})
        name += "".join(f",{isa}" for isa in packed)
    return name


def _socket_of(vllm_config: Any) -> str:
    path: str = vllm_config.kv_transfer_config.kv_connector_extra_config[SOCKET_FIELD]
    return path


def _die_with_parent() -> None:
    """The kernel ends this process with the one that started it: once a worker has ended, nothing of it writes KV."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)
