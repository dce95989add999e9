"""The requests at vLLM, from their arrival until vLLM has freed their blocks: owners of blocks, and reports to vLLM.

vLLM frees the blocks of a reserved request after a report that its KV has come or will not come, and those of a prompt
that was computed for a peer after a report that they were sent. Each report is made exactly once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from engine.core.engine import EngineRequest
from engine.core.sequence import Sequence, SequenceStatus
from engine.vllm.boot import StartedVllm
from engine.vllm.bridge import ROW_FIELD, VllmRow
from engine.vllm.plugins import salt_text
from splitserve.errors import SplitserveError
from splitserve.queues import Offer, offer_in_order

MAX_LOOKS = 64
"""Parked requests without room that are looked at in a step."""


class VllmRows:
    """All requests of one vLLM engine. `in`: whether a request's id is live or its blocks are held."""

    def __init__(self, vllm: StartedVllm, max_bypasses: int) -> None:
        """`max_bypasses`: how often later requests go before one whose adapter has no room."""
        self._vllm, self._max_bypasses = vllm, max_bypasses
        self._bridge = vllm.bridge
        self._live: dict[str, VllmRow] = {}
        self._held: dict[str, VllmRow] = {}
        self._reserved: dict[int, VllmRow] = {}
        self._writers: dict[int, VllmRow] = {}
        self._parked: dict[str, VllmRow] = {}
        """By key, in order of arrival: requests that vLLM gets when there is room for their adapters."""
        self._arrivals = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live or request_id in self._held

    @property
    def live(self) -> Collection[VllmRow]:
        """Requests that have not ended."""
        return self._live.values()

    @property
    def has_unreserved(self) -> bool:
        """Whether any request can be computed: not all of them wait for their KV."""
        return len(self._live) > len(self._reserved)

    @property
    def must_report(self) -> bool:
        """Whether the next step has something to report to vLLM."""
        return bool(self._bridge.reports_received or self._bridge.reports_sent)

    def find(self, request_id: str) -> VllmRow | None:
        """A live request."""
        return self._live.get(request_id)

    def add(self, request: EngineRequest, *, awaits_kv: bool) -> VllmRow:
        """Gives a request to vLLM; it is scheduled by the next step, or by a later one if its adapter has no room yet.

        Raises FailedPreconditionError (ADAPTER_FAILED) for an adapter that cannot be loaded.
        """
        row = VllmRow(str(self._arrivals), Sequence(request, self._arrivals), awaits_kv=awaits_kv)
        row.vllm_tokens = len(request.token_ids)
        self._arrivals += 1
        # Behind those that wait already, or a stream of requests for loaded adapters would keep others out. A
        # reservation waits in the decode worker's own queue.
        behind_others = self._parked and request.adapter is not None and not awaits_kv
        if behind_others or not self._give(row):
            self._parked[row.key] = row
        self._live[request.request_id] = row
        return row

    def waits_for_room(self, row: VllmRow) -> bool:
        """Whether vLLM has not got a request yet, because other adapters take all the room."""
        return row.key in self._parked

    def _give(self, row: VllmRow) -> bool:
        """Gives a request to vLLM; False if there is no room for its adapter."""
        request, lora = row.sequence.request, None
        if request.adapter is not None:
            assert self._vllm.adapters is not None, "the worker has no adapters"
            lora = self._vllm.adapters.acquire(request.adapter.name)
            if lora is None:
                return False
        fields = {ROW_FIELD: row.key}
        params = SamplingParams(
            temperature=0.0,  # the logits processor leaves one token
            max_tokens=1 if request.prefill_only else None,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={**fields, "kv_transfer_params": fields},
        )
        prompt = tokens_input(list(request.token_ids), cache_salt=salt_text(request.cache_salt))
        self._bridge.rows[row.key] = row
        try:
            row.vllm_id = self._vllm.engine.add_request(row.key, prompt, params, lora_request=lora)
        except BaseException:
            del self._bridge.rows[row.key]
            self._release_adapter(row)
            raise
        return True

    def give_parked(self) -> list[tuple[VllmRow, SplitserveError]]:
        """Gives vLLM the parked requests whose adapters have room now; returns those whose adapters do not load."""
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

    def _release_adapter(self, row: VllmRow) -> None:
        adapter = row.sequence.request.adapter
        if adapter is not None and self._vllm.adapters is not None:
            self._vllm.adapters.release(adapter.name)

    def step(self) -> frozenset[str]:
        """Runs a step of vLLM, and returns the keys of requests that vLLM ended in it."""
        self._bridge.scheduled = []
        outputs = self._vllm.engine.step()
        for row in self._bridge.scheduled:
            row.was_given = row.ends_tokens and row.given_token is not None
            row.vllm_tokens += row.ends_tokens
        return frozenset(output.request_id for output in outputs if output.finished)

    def lost(self, ended: Iterable[str]) -> list[VllmRow]:
        """The requests among these keys that are still live here: vLLM ended them by itself."""
        rows = (self._bridge.rows.get(key) for key in ended)
        return [row for row in rows if row is not None and row.sequence.request_id in self._live]

    def end(self, sequence: Sequence) -> None:
        """Ends a live request. Its blocks stay where a writer may write or writes may read; see `release_writer` and
        `release_held`."""
        row = self._live.pop(sequence.request_id)
        if self._parked.pop(row.key, None) is None:
            self._vllm.engine.abort_request([row.vllm_id], internal=True)
            del self._bridge.rows[row.key]
            self._release_adapter(row)
        waited = sequence.reservation
        if waited is not None:
            del self._reserved[waited]
            sequence.reservation = None
        if sequence.request.prefill_only:
            sequence.status = SequenceStatus.HELD
            self._held[sequence.request_id] = row
            return
        sequence.status = SequenceStatus.ENDED
        if waited is not None and waited not in self._writers:
            self._report_received(row)

    def release_held(self, request_id: str) -> bool:
        """Lets vLLM free the blocks of an ended prompt; returns whether there was one."""
        row = self._held.pop(request_id, None)
        if row is None:
            return False
        row.sequence.status = SequenceStatus.ENDED
        if row.held:
            row.held = False
            self._bridge.reports_sent.add(row.vllm_id)
        return True

    def knows_reservation(self, reservation: int) -> bool:
        """Whether a reservation's number is in use."""
        return reservation in self._reserved or reservation in self._writers

    def reserve(self, row: VllmRow, reservation: int) -> None:
        """A peer may write into a row's blocks from now on."""
        row.sequence.status, row.sequence.reservation = SequenceStatus.RESERVED, reservation
        self._reserved[reservation] = self._writers[reservation] = row

    def admit(self, reservation: int) -> VllmRow | None:
        """The KV of a reservation has come: vLLM may go on with it. None for one that is not live."""
        row = self._reserved.pop(reservation, None)
        if row is not None:
            row.sequence.reservation = None
            self._report_received(row)
        return row

    def release_writer(self, reservation: int) -> bool:
        """The peer is done with a reservation's blocks; returns whether it was not before."""
        row = self._writers.pop(reservation, None)
        if row is None:
            return False
        if row.sequence.status is SequenceStatus.ENDED:
            self._report_received(row)
        return True

    def reserved_blocks(self) -> tuple[int, int]:
        """Blocks of requests that wait for their KV, and of ended ones whose peers may still write."""
        quarantined = [
            row
            for row in self._writers.values()
            if row.sequence.status is SequenceStatus.ENDED and not row.received
        ]
        return _blocks(self._reserved.values()), _blocks(quarantined)

    def _report_received(self, row: VllmRow) -> None:
        if not row.received:
            row.received = True
            self._bridge.reports_received.add(row.vllm_id)


def _blocks(rows: Iterable[VllmRow]) -> int:
    return sum(len(row.reserved.block_ids) for row in rows if row.reserved is not None)
