"""The requests at vLLM, from their arrival until vLLM has freed their blocks: who owns the blocks, what vLLM is told.

vLLM frees the blocks of a reserved request after a report that its KV has come or will not come, and those of a prompt
that was computed for a peer after a report that they were sent. Each report is made exactly once: a second one would
end vLLM.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from vllm.inputs.engine import tokens_input

from engine.core.engine import EngineRequest, ReservedBlocks
from engine.core.sequence import Sequence, SequenceStatus
from engine.vllm.boot import StartedVllm
from engine.vllm.prefix_events import salt_text
from engine.vllm.sampling import vllm_params
from splitserve.errors import InvalidArgumentError, SplitserveError
from splitserve.queues import Offer, offer_in_order
from splitserve.v1 import vllm_pb2 as pb

MAX_LOOKS = 64
"""Parked requests without room that are looked at in a step."""


@dataclass(eq=False, slots=True)
class VllmRow:
    """One request at vLLM: its sequence here, and what vLLM said of it."""

    key: str
    request: EngineRequest
    sequence: Sequence
    """Without the grammar, which vLLM follows."""
    awaits_kv: bool
    """A peer writes the KV of its tokens."""
    vllm_id: str = ""
    """The id that vLLM knows it by; empty while it is parked."""
    reserved: ReservedBlocks | None = None
    """The blocks that vLLM has allocated for a peer."""
    writer: int | None = None
    """The reservation under which a peer may be writing."""
    received: bool = False
    """vLLM has been told that its KV has come or will not come."""
    given: int | None = None
    """The first token that the peer sampled, until vLLM has repeated it."""
    held: tuple[tuple[int, ...], ...] | None = None
    """The blocks that vLLM keeps for a peer, group by group, as its output names them."""
    kept: bool = False
    """vLLM keeps its blocks until it is told that they were sent. Known before `held` where the output is read late."""
    sent: bool = False
    """vLLM has been told that they were sent."""
    over: bool = False
    """It has ended here."""
    gone: bool = False
    """It has ended at vLLM."""
    bypassed: int = 0
    """How many later requests vLLM got while there was no room for its adapter."""

    @property
    def owes_nothing(self) -> bool:
        """Whether vLLM needs to be told nothing more of it, and will tell nothing more."""
        return self.gone and (self.received or self.reserved is None) and (self.sent or not self.kept)


class VllmRows:
    """All requests of one vLLM engine. `in`: whether a request's id is live or its blocks are held."""

    def __init__(self, vllm: StartedVllm, max_bypasses: int) -> None:
        """`max_bypasses`: how often later requests go before one whose adapter has no room."""
        self._vllm, self._max_bypasses = vllm, max_bypasses
        self._live: dict[str, VllmRow] = {}
        self._held: dict[str, VllmRow] = {}
        self._reserved: dict[int, VllmRow] = {}
        self._writers: dict[int, VllmRow] = {}
        self._parked: dict[str, VllmRow] = {}
        """By key, in order of arrival: requests that vLLM gets when there is room for their adapters."""
        self._at_vllm: dict[str, VllmRow] = {}
        """By vLLM's id, until nothing is owed."""
        self._arrivals = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live or request_id in self._held

    @property
    def live(self) -> Collection[VllmRow]:
        """Requests that have not ended here."""
        return self._live.values()

    @property
    def has_parked(self) -> bool:
        """Whether any request waits for room for its adapter."""
        return bool(self._parked)

    def find(self, request_id: str) -> VllmRow | None:
        """A live request."""
        return self._live.get(request_id)

    def find_held(self, request_id: str) -> VllmRow | None:
        """An ended request whose blocks are held."""
        return self._held.get(request_id)

    def at_vllm(self, vllm_id: str) -> VllmRow | None:
        """The request that vLLM knows by this id."""
        return self._at_vllm.get(vllm_id)

    def add(self, request: EngineRequest, *, awaits_kv: bool) -> VllmRow:
        """Gives a request to vLLM, now or when there is room for its adapter.

        Raises FailedPreconditionError (ADAPTER_FAILED) for an adapter that cannot be loaded, InvalidArgumentError for
        what vLLM refuses.
        """
        row = VllmRow(
            str(self._arrivals), request, Sequence(replace(request, grammar=None), self._arrivals), awaits_kv
        )
        self._arrivals += 1
        # Behind those that wait already, or a stream of requests for loaded adapters would keep others out. A
        # reservation waits in the decode worker's own queue.
        behind_others = self._parked and request.adapter is not None and not awaits_kv
        if behind_others or not self._give(row):
            self._parked[row.key] = row
        self._live[request.request_id] = row
        return row

    def give_parked(self) -> list[tuple[VllmRow, SplitserveError]]:
        """Gives vLLM the parked requests whose adapters have room now; returns those that cannot be given."""
        failed: list[tuple[VllmRow, SplitserveError]] = []

        def attempt(row: VllmRow) -> Offer:
            try:
                return Offer.TAKEN if self._give(row) else Offer.MISFIT
            except SplitserveError as error:
                failed.append((row, error))
                return Offer.SKIP

        rows = list(self._parked.values())
        for row in offer_in_order(rows, attempt, max_bypasses=self._max_bypasses, max_looks=MAX_LOOKS):
            del self._parked[row.key]
        return failed

    def end(self, sequence: Sequence) -> None:
        """Ends a live request. Its blocks stay where a writer may write or writes may read; see `release_writer` and
        `release_held`."""
        row = self._live.pop(sequence.request_id)
        row.over = True
        if sequence.reservation is not None:
            del self._reserved[sequence.reservation]
            sequence.reservation = None
        if self._parked.pop(row.key, None) is None:
            if not row.gone and row.held is None:
                self._vllm.core.abort_requests([row.vllm_id])
            self._release_adapter(row)
        if row.held is not None:
            sequence.status = SequenceStatus.HELD
            self._held[sequence.request_id] = row
            return
        sequence.status = SequenceStatus.ENDED
        if row.kept:
            self._report_sent(row)
        self._report_unwritten(row)
        self._forget_if_done(row)

    def release_held(self, request_id: str) -> bool:
        """Lets vLLM free the blocks of an ended prompt; returns whether there was one."""
        row = self._held.pop(request_id, None)
        if row is None:
            return False
        row.sequence.status = SequenceStatus.ENDED
        self._report_sent(row)
        return True

    def knows_reservation(self, reservation: int) -> bool:
        """Whether a reservation's number is in use."""
        return reservation in self._reserved or reservation in self._writers

    def grant(self, row: VllmRow, reservation: int) -> None:
        """A peer may write into a row's blocks from now on."""
        row.sequence.status, row.sequence.reservation = SequenceStatus.RESERVED, reservation
        row.writer = reservation
        self._reserved[reservation] = self._writers[reservation] = row

    def admit(self, reservation: int, first_token: int) -> VllmRow | None:
        """The KV of a reservation has come: vLLM goes on with it and chooses `first_token`. None for a reservation that
        is not live."""
        row = self._reserved.pop(reservation, None)
        if row is None:
            return None
        row.sequence.reservation, row.given = None, first_token
        self._report_received(row, first_token)
        return row

    def release_writer(self, reservation: int) -> bool:
        """The peer is done with a reservation's blocks; returns whether it was not before."""
        row = self._writers.pop(reservation, None)
        if row is None:
            return False
        row.writer = None
        if row.over:
            self._report_unwritten(row)
            self._forget_if_done(row)
        return True

    def reserved_blocks(self) -> tuple[int, int]:
        """Blocks of requests that wait for their KV, and of ended ones whose peers may still write."""
        waiting = [row for row in self._live.values() if not row.received]
        quarantined = [row for row in self._writers.values() if row.over and not row.received]
        return _blocks(waiting), _blocks(quarantined)

    @property
    def may_be_written(self) -> bool:
        """Whether any peer may be writing."""
        return bool(self._writers)

    def allocated(self, event: pb.VllmAllocated) -> None:
        """vLLM has allocated blocks for a peer."""
        row = self._at_vllm[event.request_id]
        row.reserved = ReservedBlocks(tuple(event.blocks), event.cached_tokens, tuple(event.group_blocks))
        if row.over:
            self._report_unwritten(row)

    def ended(self, event: pb.VllmEnded) -> None:
        """vLLM has ended a request. One whose blocks it keeps although it was given up here is let go."""
        row = self._at_vllm[event.request_id]
        row.gone, row.kept = True, event.held
        if row.kept and row.over and row.held is None:
            self._report_sent(row)
        self._forget_if_done(row)

    def _give(self, row: VllmRow) -> bool:
        """Gives a request to vLLM; False if there is no room for its adapter."""
        request, lora = row.request, None
        if request.adapter is not None:
            assert self._vllm.adapters is not None, "the worker has no adapters"
            lora = self._vllm.adapters.acquire(request.adapter.name)
            if lora is None:
                return False
        try:
            made = self._made(row, lora)
        except BaseException:
            row.over = True
            self._release_adapter(row)
            raise
        row.vllm_id = made.request_id
        self._at_vllm[row.vllm_id] = row
        self._vllm.core.add_request(made)
        return True

    def _made(self, row: VllmRow, lora: Any) -> Any:
        """vLLM's own form of a request. Raises InvalidArgumentError for what vLLM refuses."""
        request = row.request
        prompt = tokens_input(list(request.token_ids), cache_salt=salt_text(request.cache_salt))
        processor = self._vllm.engine.input_processor
        try:
            params = vllm_params(request, row.key, awaits_kv=row.awaits_kv)
            made = processor.process_inputs(
                row.key, prompt, params, supported_tasks=("generate",), lora_request=lora
            )
        except (ValueError, TypeError) as error:
            raise InvalidArgumentError(f"vLLM refuses it: {error}", field="sampling") from error
        processor.assign_request_id(made)
        return made

    def _release_adapter(self, row: VllmRow) -> None:
        adapter = row.request.adapter
        if adapter is not None and self._vllm.adapters is not None:
            self._vllm.adapters.release(adapter.name)

    def _report_unwritten(self, row: VllmRow) -> None:
        """The KV of a request that has ended does not come any more, once its peer is done."""
        if row.reserved is not None and row.writer is None and not row.received:
            self._report_received(row, None)

    def _report_received(self, row: VllmRow, first_token: int | None) -> None:
        row.received = True
        received = pb.VllmReceived(request_id=row.vllm_id, key=row.key, first_token=first_token)
        self._vllm.processes.command(pb.VllmCommand(reports=pb.VllmReports(received=[received])))

    def _report_sent(self, row: VllmRow) -> None:
        row.sent = True
        self._vllm.processes.command(pb.VllmCommand(reports=pb.VllmReports(sent=[row.vllm_id])))
        self._forget_if_done(row)

    def _forget_if_done(self, row: VllmRow) -> None:
        if row.over and row.owes_nothing:
            self._at_vllm.pop(row.vllm_id, None)


def _blocks(rows: Iterable[VllmRow]) -> int:
    return sum(len(row.reserved.block_ids) for row in rows if row.reserved is not None)
