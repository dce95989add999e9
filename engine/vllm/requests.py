"""The requests that a worker has given to vLLM, until vLLM has freed their blocks.

vLLM waits for reports before it frees blocks. For a request whose KV a peer writes: the KV has arrived, or will not
arrive. For a prompt whose KV goes to a peer: the blocks have been sent. Each report is made exactly once, because vLLM
ends when a request is reported twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input

from engine.core.engine import EngineRequest, ReservedBlocks
from engine.core.sequence import Sequence, SequenceStatus
from engine.vllm.boot import StartedVllm
from engine.vllm.first_token import ID_FIELD
from engine.vllm.sampling import vllm_params, vllm_pooling_params
from splitserve.errors import InvalidArgumentError, SplitserveError
from splitserve.queues import Offer, offer_in_order
from splitserve.v1 import vllm_pb2 as pb

MAX_LOOKS = 64
"""How many parked requests without room are tried in one step."""


@dataclass(eq=False, slots=True)
class VllmRequest:
    """One request: the worker's sequence, and where the request stands at vLLM."""

    request: EngineRequest
    sequence: Sequence
    """The sequence's request has no grammar, because vLLM follows the grammar."""
    awaits_kv: bool
    """Whether a peer writes the KV of the prompt."""
    vllm_id: str = ""
    """vLLM's id of the request; empty while the request is parked."""
    reserved: ReservedBlocks | None = None
    """The blocks that vLLM has allocated for a peer's writes."""
    writer: int | None = None
    """The number of the reservation with which a peer may be writing."""
    owes_received: bool = False
    """Whether vLLM waits for the report that the KV has arrived or will not arrive."""
    repeated_token: int | None = None
    """The first token of a handoff, until vLLM has put it out too."""
    held: list[list[int]] | None = None
    """The blocks that vLLM keeps for a peer, one list for each group of layers; from the request's last output."""
    owes_sent: bool = False
    """Whether vLLM waits for the report that the blocks were sent. This can be known before `held`."""
    ended: bool = False
    """Whether the worker has ended it."""
    ended_at_vllm: bool = False
    bypassed: int = 0
    """How many later requests vLLM got while there was no room for the adapter of this one."""


class VllmRequests:
    """All requests of one vLLM engine."""

    def __init__(self, vllm: StartedVllm, max_bypasses: int) -> None:
        """`max_bypasses`: how many later requests may overtake one whose adapter has no room."""
        self._vllm, self._max_bypasses = vllm, max_bypasses
        self.live: dict[str, VllmRequest] = {}
        """Requests that the worker has not ended, by request id."""
        self.held: dict[str, VllmRequest] = {}
        """Ended requests whose blocks vLLM keeps for a peer, by request id."""
        self.at_vllm: dict[str, VllmRequest] = {}
        """Requests for which vLLM may still send an event or wait for a report, by vLLM's id."""
        self.writers: dict[int, VllmRequest] = {}
        """Requests into whose blocks a peer may be writing, by reservation number."""
        self._parked: dict[str, VllmRequest] = {}
        """Requests that wait for room for their adapters, by request id, in order of arrival."""
        self._arrivals = 0

    def add(self, request: EngineRequest, *, awaits_kv: bool) -> Sequence:
        """Gives a request to vLLM, now or when there is room for its adapter; returns its sequence.

        Raises FailedPreconditionError (ADAPTER_FAILED) for an adapter that cannot be loaded, InvalidArgumentError
        (field `sampling`) for a request that vLLM refuses.
        """
        sequence = Sequence(replace(request, grammar=None), self._arrivals)
        entry = VllmRequest(request, sequence, awaits_kv)
        self._arrivals += 1
        # A request with an adapter queues behind parked ones, or requests for loaded adapters would starve them. A
        # reservation does not: it has waited its turn in the decode worker's own queue.
        behind_others = self._parked and request.adapter is not None and not awaits_kv
        if behind_others or not self._give(entry):
            self._parked[request.request_id] = entry
        self.live[request.request_id] = entry
        return sequence

    def give_parked(self) -> list[tuple[Sequence, SplitserveError]]:
        """Gives vLLM the parked requests whose adapters have room now; returns those that fail."""
        failed: list[tuple[Sequence, SplitserveError]] = []

        def attempt(entry: VllmRequest) -> Offer:
            try:
                return Offer.TAKEN if self._give(entry) else Offer.MISFIT
            except SplitserveError as error:
                failed.append((entry.sequence, error))
                return Offer.SKIP

        parked = list(self._parked.values())
        for entry in offer_in_order(parked, attempt, max_bypasses=self._max_bypasses, max_looks=MAX_LOOKS):
            del self._parked[entry.request.request_id]
        return failed

    def end(self, sequence: Sequence) -> None:
        """Ends a live request, so that vLLM frees its blocks.

        Blocks that a peer may write are freed after `release_writer`, held blocks after `release_held`.
        """
        entry = self.live.pop(sequence.request_id)
        entry.ended, sequence.reservation = True, None
        if self._parked.pop(sequence.request_id, None) is None:
            if not entry.ended_at_vllm and entry.held is None:
                self._vllm.engine.engine_core.abort_requests([entry.vllm_id])
            self._release_adapter(entry)
        if entry.held is not None:
            self.held[sequence.request_id] = entry
        sequence.status = SequenceStatus.ENDED if entry.held is None else SequenceStatus.HELD
        self._settle(entry)

    def release_held(self, request_id: str) -> bool:
        """Lets vLLM free the held blocks of a request; returns whether there were any. Idempotent."""
        entry = self.held.pop(request_id, None)
        if entry is None:
            return False
        entry.sequence.status = SequenceStatus.ENDED
        self._settle(entry)
        return True

    def waiting(self, reservation: int) -> VllmRequest | None:
        """The live request of a reservation whose KV has not been admitted."""
        return next((e for e in self.live.values() if e.sequence.reservation == reservation), None)

    def grant(self, entry: VllmRequest, reservation: int) -> None:
        """Lets a peer write into a request's blocks, until `release_writer`."""
        entry.sequence.status, entry.sequence.reservation = SequenceStatus.RESERVED, reservation
        if not self.writers:
            self._send_awaiting(True)
        entry.writer, self.writers[reservation] = reservation, entry

    def admit(self, reservation: int, first_token: int) -> Sequence | None:
        """Reports that the KV of a reservation has arrived, and has vLLM choose `first_token`.

        Returns the request's sequence, None for a reservation that is not live.
        """
        entry = self.waiting(reservation)
        if entry is None:
            return None
        entry.sequence.reservation, entry.repeated_token = None, first_token
        self._report_received(entry, first_token)
        return entry.sequence

    def release_writer(self, reservation: int) -> bool:
        """Ends a peer's ownership of a reservation's blocks; returns whether it had any. Idempotent."""
        entry = self.writers.pop(reservation, None)
        if entry is None:
            return False
        entry.writer = None
        if not self.writers:
            self._send_awaiting(False)
        self._settle(entry)
        return True

    def reserved_blocks(self) -> tuple[int, int]:
        """The number of blocks of live requests that wait for KV, and of ended ones into which peers may write."""
        waiting = (entry for entry in self.live.values() if entry.owes_received)
        quarantined = (entry for entry in self.writers.values() if entry.ended and entry.owes_received)
        return _blocks(waiting), _blocks(quarantined)

    def on_scheduler(self, event: pb.VllmEvent) -> None:
        """Takes an event of vLLM's scheduler."""
        if event.HasField("allocated"):
            allocated = event.allocated
            entry = self.at_vllm[allocated.request_id]
            entry.owes_received = True
            entry.reserved = ReservedBlocks(
                tuple(allocated.blocks), allocated.cached_tokens, tuple(allocated.group_blocks)
            )
        else:
            entry = self.at_vllm[event.ended.request_id]
            entry.ended_at_vllm, entry.owes_sent = True, event.ended.held
        self._settle(entry)

    def _give(self, entry: VllmRequest) -> bool:
        """Gives a request to vLLM. Returns False if there is no room for its adapter. Raises like `add`."""
        request, lora = entry.request, None
        if request.adapter is not None:
            assert self._vllm.adapters is not None, "the worker has no adapters"
            lora = self._vllm.adapters.acquire(request.adapter.name)
            if lora is None:
                return False
        prompt = tokens_input(list(request.token_ids), cache_salt=request.cache_salt.hex() or None)
        processor = self._vllm.engine.input_processor
        try:
            task = self._vllm.task
            params = (
                vllm_params(request, awaits_kv=entry.awaits_kv)
                if request.pooling is None
                else vllm_pooling_params(request, task, processor)
            )
            core_request = processor.process_inputs(
                str(entry.sequence.arrival), prompt, params, supported_tasks=(task,), lora_request=lora
            )
        except Exception as error:
            self._release_adapter(entry)
            if isinstance(error, VLLMClientError | ValueError | TypeError):
                raise InvalidArgumentError(f"vLLM refuses it: {error}", field="sampling") from error
            raise
        processor.assign_request_id(core_request)
        if entry.awaits_kv:
            core_request.sampling_params.extra_args[ID_FIELD] = core_request.request_id
        entry.vllm_id = core_request.request_id
        self.at_vllm[entry.vllm_id] = entry
        self._vllm.engine.engine_core.add_request(core_request)
        return True

    def _send_awaiting(self, awaiting: bool) -> None:
        """Tells the ranks that peers begin or end to write: in between they poll for notifications often."""
        self._vllm.processes.command(pb.VllmCommand(awaiting=awaiting))

    def _release_adapter(self, entry: VllmRequest) -> None:
        if entry.request.adapter is not None and self._vllm.adapters is not None:
            self._vllm.adapters.release(entry.request.adapter.name)

    def _report_received(self, entry: VllmRequest, first_token: int | None) -> None:
        entry.owes_received = False
        received = pb.VllmReceived(request_id=entry.vllm_id, first_token=first_token)
        self._vllm.processes.command(pb.VllmCommand(reports=pb.VllmReports(received=[received])))

    def _settle(self, entry: VllmRequest) -> None:
        """Makes the reports of a request that are due, and forgets it once vLLM sends no more events for it."""
        if not entry.ended:
            return
        # 1. The KV will not arrive, and no peer may write it.
        if entry.owes_received and entry.writer is None:
            self._report_received(entry, None)
        # 2. Nobody reads the blocks, or reads them any more.
        if entry.owes_sent and self.held.get(entry.request.request_id) is not entry:
            entry.owes_sent = False
            self._vllm.processes.command(pb.VllmCommand(reports=pb.VllmReports(sent=[entry.vllm_id])))
        # 3. Without a connector, as with pooling models, nobody says that a request has ended.
        ended_at_vllm = entry.ended_at_vllm or entry.request.pooling is not None
        if ended_at_vllm and not (entry.owes_received or entry.owes_sent):
            self.at_vllm.pop(entry.vllm_id, None)


def _blocks(entries: Iterable[VllmRequest]) -> int:
    return sum(len(entry.reserved.block_ids) for entry in entries if entry.reserved is not None)
