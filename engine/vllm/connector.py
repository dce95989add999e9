"""The KV connector that vLLM loads in the process of its scheduler and in each rank.

It is a subclass of vLLM's `NixlPushConnector`, which knows the KV layouts of all models. Three things differ:

- Peers come from splitserve's registry. vLLM's handshake port stays closed.
- The worker decides which blocks are written where, when the KV of a request has arrived, and when blocks are free.
- The connector acts on no notification of a peer. It passes notifications to the worker, whose reservation table checks
  them.

vLLM ends its engine when a method of the connector raises, and when a request is reported twice.
"""

from __future__ import annotations

import base64
import logging
import os
import threading
import time
from binascii import Error as NoBase64
from collections import deque
from collections.abc import Iterable
from functools import partial
from itertools import islice, product
from typing import Any

import msgspec
import torch
from typing_extensions import override
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
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
from vllm.v1.structured_output.backend_guidance import GuidanceBackend

from engine.vllm.first_token import first_tokens
from engine.vllm.grammar_tokenizer import grammar_tokenizer
from engine.vllm.links import VllmEndedError, VllmLink, end_with_starter
from splitserve.v1 import vllm_pb2 as pb

SOCKET_FIELD = "splitserve_socket"
"""Field of `kv_connector_extra_config`: the path of the worker's Unix socket."""
AWAITS_FIELD = "splitserve_awaits_kv"
"""Field of a request's `kv_transfer_params`: a peer writes the request's KV."""
HOLD_FIELD = "splitserve_hold"
"""Field of a request's `kv_transfer_params`: vLLM keeps the blocks when the request ends."""
PRIOR_FIELD = "splitserve_prior"
"""Field of a request's `kv_transfer_params`: how many of the prompt's last tokens earlier attempts put out."""
HELD_FIELD = "splitserve_held"
"""Field of the `kv_transfer_params` of a request's last output: the kept blocks, one list for each group of layers."""
BUSY_POLL_S = 0.0005
IDLE_POLL_S = 0.1
SILENT_WRITE = b"-"
"""The notification that NIXL carries with a write that completes nothing. Receivers ignore it."""
YIELD_S = 0.0001
_COMPLETED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)

logger = logging.getLogger(__name__)


class SplitserveConnector(NixlPushConnector):
    """The class that vLLM instantiates, once in each process."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        end_with_starter()  # a dead worker writes no KV
        if current_platform.is_cpu():
            # vLLM's processes wait for each other in a loop of yields, which takes cores from those that compute.
            shm_broadcast.sched_yield = partial(time.sleep, YIELD_S)
        if role is KVConnectorRole.SCHEDULER:
            # Else a grammar would keep the model from writing a tag, such as <tool_call>, as one token.
            made = partial(grammar_tokenizer, GuidanceBackend._build_ll_tokenizer)
            GuidanceBackend._build_ll_tokenizer = staticmethod(made)
            self.connector_scheduler = SchedulerSide(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = RankSide(vllm_config, self.engine_id, kv_cache_config)

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert isinstance(self.connector_worker, RankSide)
        return self.connector_worker.take_reports(finished_req_ids)

    @override
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing: the worker starts all writes."""


class SchedulerSide(NixlPushConnectorScheduler):
    """The connector in the process of vLLM's scheduler.

    It tells the worker which blocks vLLM has allocated, and keeps the blocks of prompts that are sent to a peer.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._link = VllmLink.to_worker(_socket_of(vllm_config), pb.VllmHello(scheduler=pb.VllmScheduler()))

    @override
    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """Opens no port: the ranks send their handshakes to the worker."""

    @override
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Returns how many tokens of a request come from a peer, and whether vLLM must wait for them.

        They are all uncached tokens, or none. vLLM asks again after a preemption: then it computes the KV itself.
        """
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
    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether vLLM keeps the request's blocks until the ranks report them as sent."""
        params = request.kv_transfer_params or {}
        held = bool(params.get(HOLD_FIELD)) and request.status in _COMPLETED
        self._link.send(pb.VllmEvent(ended=pb.VllmEnded(request_id=request.request_id, held=held)))
        if not held:
            return False, None
        blocks = self.get_exchange_clipped_blocks(block_ids)
        # While this has entries, vLLM runs empty steps, in which the ranks report.
        self._finished_request_blocks[request.request_id] = blocks
        return True, {HELD_FIELD: [list(group) for group in blocks]}


class RewindingGenerator(torch.Generator):
    """A random generator on CPU with an offset, which PyTorch's generators have on GPUs only.

    For each chunk of a prompt except the last one, vLLM draws a token, drops it, and lowers the generator's offset to
    take the draw back. These draws come before the first token of the answer, so going back to the seed is the same.
    """

    @override
    def get_offset(self) -> int:
        return 4  # as much as vLLM takes off for a draw

    @override
    def set_offset(self, offset: int) -> None:
        """Goes back to the seed. After a preemption the rest of the answer is a fresh draw."""
        self.manual_seed(self.initial_seed())


class RankSide(NixlPushConnectorWorker):
    """The connector in a rank. A thread carries out the worker's commands, and sends it NIXL's events."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        # vLLM gives NIXL a progress thread, which would occupy a core. The thread of `_serve` polls instead.
        config = base_worker.nixl_agent_config
        base_worker.nixl_agent_config = partial(config, enable_prog_thread=False)
        cores = os.sched_getaffinity(0)
        try:
            super().__init__(vllm_config, engine_id, kv_cache_config)
        finally:
            base_worker.nixl_agent_config = config
            # On CPU, vLLM pins this computing thread to the last visible core, which is the same in all its processes.
            os.sched_setaffinity(0, cores)
        if current_platform.is_cpu():
            torch.Generator = RewindingGenerator
            if torch.cpu._is_amx_tile_supported():
                # vLLM's attention uses AMX, and leaves it to oneDNN to ask Linux for it, which a quantized model may
                # not call before.
                torch.cpu._init_amx()
        self._link: VllmLink | None = None
        self._reports: deque[pb.VllmReports] = deque()
        """The thread of `_serve` adds them, and vLLM's thread takes them."""
        self._awaiting = False
        """Whether peers may be writing."""

    @override
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Registers the KV with NIXL and connects to the worker."""
        NixlBaseConnectorWorker.register_kv_caches(self, kv_caches)
        rank = pb.VllmRank(
            index=get_pp_group().rank_in_group * self.world_size + self.tp_rank,
            agent_id=self.nixl_wrapper.name,
            handshake=msgspec.msgpack.encode(self.xfer_handshake_metadata),
            base_address=self.kv_caches_base_addr[self.engine_id][self.tp_rank][0],
            device_index=max(0, self.device_id),
            axis_order=_axis_order(self.vllm_config, self.backend_name),
        )
        self._link = VllmLink.to_worker(_socket_of(self.vllm_config), pb.VllmHello(rank=rank))
        threading.Thread(target=self._serve, args=(self._link,), name="splitserve-kv", daemon=True).start()

    def take_reports(self, finished: set[str]) -> KVConnectorTransferResults:
        """Returns the worker's reports since the last step. `finished`: vLLM's ids of requests that have ended."""
        for request_id in finished:
            first_tokens.pop(request_id, None)
        results = KVConnectorTransferResults()
        while self._reports:
            reports = self._reports.popleft()
            results.finished_sending.update(reports.sent)
            results.finished_recving.update(received.request_id for received in reports.received)
        return results

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
                command = link.receive(pb.VllmCommand, BUSY_POLL_S if busy else IDLE_POLL_S)
                if command is not None:
                    try:
                        self._carry_out(link, command)
                    except VllmEndedError:
                        raise
                    except Exception:
                        logger.exception("splitserve: a %s has failed", command.WhichOneof("kind"))
                self._send_ended_writes(link)
                self._send_notifications(link)
        except VllmEndedError:
            return  # the worker has ended, and the kernel ends this process with it

    def _carry_out(self, link: VllmLink, command: pb.VllmCommand) -> None:
        match command.WhichOneof("kind"):
            case "connect":
                error = ""
                try:
                    self._connect(command.connect)
                except Exception as caught:
                    error = f"{type(caught).__name__}: {caught}"
                link.send(pb.VllmEvent(reply=pb.VllmReply(error=error)))
            case "disconnect" if command.disconnect in self._remote_agents:
                self._cleanup_remote_engine(command.disconnect)
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
                raise ValueError(f"its handshake names engine {metadata.engine_id}, not {peer.engine_id}")
            self._validate_remote_parallel_config(metadata)
            # vLLM writes to no peer with pipeline stages. Such a peer only needs an agent, so that it can write here.
            if stages > 1:
                agents[stage, rank] = self.nixl_wrapper.add_remote_agent(metadata.agent_metadata)
            else:
                agents[stage, rank] = self.add_remote_agent(metadata, rank, size, metadata.dcp_size)
        self._remote_agents[peer.engine_id] = agents

    def _write(self, link: VllmLink, write: pb.VllmWrite) -> None:
        name, error, in_doubt = str(write.handle), "", False
        # 1. The worker may have given up the write: nothing is posted.
        # 2. The peer was disconnected, or never connected: nothing is posted.
        # 3. vLLM posts the write. If it fails, it may have posted a part.
        if time.monotonic_ns() >= write.post_before_ns:
            error = "the rank was stopped for too long"
        elif write.engine_id not in self._remote_agents:
            error = "the peer is not connected"
        else:
            try:
                self._post(name, write)
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

    def _post(self, name: str, write: pb.VllmWrite) -> None:
        """Has vLLM post a write under this name. vLLM sends the remote request's id as NIXL's notification."""
        local, remote = (
            _groups(blocks, write.group_blocks) for blocks in (write.local_blocks, write.remote_blocks)
        )
        remote_id = base64.b64encode(write.notification) if write.notification else SILENT_WRITE
        target = RemoteMeta(remote, "", 0, write.engine_id, remote_id.decode())
        physical = self._logical_to_kernel_block_ids(local, self._physical_blocks_per_logical_kv_block)
        self._xfer_blocks_for_req(name, ReqMeta(local, physical, self.world_size, remote=target))

    def _notify(self, notify: pb.VllmNotify) -> None:
        agents = self._remote_agents.get(notify.engine_id)
        if agents:
            message = base64.b64encode(notify.notification) + b":1"  # as vLLM writes it: id, number of ranks
            self.nixl_wrapper.send_notif(next(iter(agents.values())), notif_msg=message)

    def _report(self, reports: pb.VllmReports) -> None:
        for received in reports.received:
            if received.HasField("first_token"):
                first_tokens[received.request_id] = received.first_token
        self._reports.append(reports)

    def _send_ended_writes(self, link: VllmLink) -> None:
        if not self._sending_transfers:
            return
        done, failed = self._pop_done_transfers(self._sending_transfers)
        self._send_failures |= failed
        for name in done:
            error = "NIXL reports an error" if name in self._send_failures else ""
            self._send_failures.discard(name)
            ended = pb.VllmWriteEnded(handle=int(name), error=error, in_doubt=bool(error))
            link.send(pb.VllmEvent(write_ended=ended))

    def _send_notifications(self, link: VllmLink) -> None:
        for agent_id, messages in self.nixl_wrapper.get_new_notifs().items():
            name = agent_id.decode() if isinstance(agent_id, bytes) else agent_id
            for message in messages:
                remote_id = message.rpartition(b":")[0]
                if remote_id == SILENT_WRITE:
                    continue
                try:
                    notification = base64.b64decode(remote_id, validate=True)
                except NoBase64:
                    notification = message  # the worker counts it as malformed
                notified = pb.VllmNotified(agent_id=name, notification=notification)
                link.send(pb.VllmEvent(notified=notified))


def _advance_grammar(request: Any, prior: int) -> None:
    """Feeds a request's grammar the `prior` last tokens of the prompt, which earlier attempts put out."""
    structured = request.structured_output_request
    if structured is not None and structured.grammar is not None:
        structured.grammar.accept_tokens(request.request_id, list(request.all_token_ids[-prior:]))


def _groups(blocks: Iterable[int], counts: Iterable[int]) -> tuple[list[int], ...]:
    remaining = iter(blocks)
    return tuple(list(islice(remaining, count)) for count in counts)


def _axis_order(vllm_config: Any, backend: str) -> str:
    """A name of the order in which an attention backend keeps a block's bytes.

    The order is opaque, so the backend names it; on CPU also the instruction set for which vLLM has packed the blocks.
    """
    name = f"vllm:{backend.lower()}"
    if current_platform.is_cpu():
        layers = vllm_config.compilation_config.static_forward_context.values()
        packed = sorted({str(vars(layer)["isa"]) for layer in layers if "isa" in vars(layer)})
        name += "".join(f",{isa}" for isa in packed)
    return name


def _socket_of(vllm_config: Any) -> str:
    path: str = vllm_config.kv_transfer_config.kv_connector_extra_config[SOCKET_FIELD]
    return path
