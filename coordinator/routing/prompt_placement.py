"""Applies `pair_choice` to the registered workers: their fits and streams as reported, their prompts as booked here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from coordinator.routing.local_prefill import NO_LIMIT
from coordinator.routing.pair_choice import (
    PromptPlace,
    StreamPlace,
    choose_place,
    choose_stream,
    granted_tokens,
    pressure_on_streams,
    share_left,
)
from coordinator.routing.prompt_book import PromptBook
from coordinator.routing.router import Pair, RoutingRequest, cached_tokens, held_prefix
from coordinator.routing.scores import needed_blocks
from coordinator.workers.load import DEFAULT_PREFILL_TOKENS_PER_S
from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.snapshot import PoolName, PoolSnapshot, Worker
from engine.pacing.lending import MIN_LENT_TOKENS
from engine.pacing.step_time_fit import DecodeStepFit, PromptFit
from splitserve.v1 import registry_pb2

_UNMEASURED = PromptFit(0.0, 1 / DEFAULT_PREFILL_TOKENS_PER_S, 0.0)
MAX_DECODES = 64
"""Workers that are looked at; of larger clusters only those that the router has chosen."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that is to be placed, at one moment. `fit` is that of the router's prefill worker, for those that have
    none of their own."""

    request: RoutingRequest
    snapshot: PoolSnapshot
    due_s: float
    tpot_s: float | None
    now: float
    fit: PromptFit

    @property
    def is_small(self) -> bool:
        """Whether all workers may be looked at."""
        return len(self.snapshot.workers) <= MAX_DECODES

    def others(self, pool: PoolName) -> list[Worker]:
        """The workers of a pool that take requests, where there are not too many."""
        return self.snapshot.accepting(self.request.model, pool) if self.is_small else []

    def may_mix(self, worker: Worker) -> bool:
        """Whether a worker may compute prompts beside streams: not one that would let them hold up streams that are
        promised their time, and none that has failed the request."""
        paces = self.tpot_s is None or worker.paces_prompts
        return paces and worker.key not in self.request.exclude


class PromptPlacement:
    """Decides with the pair who computes the prompt and who decodes, where the request has a target and the workers are
    measured."""

    def __init__(self, loads: LoadLedger, book: PromptBook) -> None:
        self._loads, self._book = loads, book

    def placed(
        self,
        pair: Pair,
        request: RoutingRequest,
        snapshot: PoolSnapshot,
        due_s: float,
        tpot_s: float | None,
        now: float,
    ) -> Pair:
        """The pair with `local_tokens`, and with other workers where the policy prefers them; unchanged if there is
        nothing to decide by. `due_s`: when the first token is due, infinity for never; `tpot_s`: what streams are
        promised."""
        fit, decode = self._prompt_fit(pair.prefill), pair.decode
        if decode is None or pair.is_own or due_s == float("inf"):
            return pair
        if fit is None and self._loads.decode[decode.key].has_host:
            fit = self._prompt_fit(decode) or _UNMEASURED  # nobody else is to measure it
        if fit is None:
            return pair
        asked = _Asked(request, snapshot, due_s, tpot_s, now, fit)
        pair, prefill = self._least_ready(pair, decode, asked)
        decodes = self._decodes(pair, decode, asked)
        places = [self._decode_place(worker, pair, asked) for worker in decodes]
        if not all(place.has_host for place in places):  # beside others none has all that comes
            places = [replace(place, has_host=False) for place in places]
        left_s = due_s - now
        chosen = choose_place(prefill, places, left_s)
        if chosen is None:
            return self._streamed(pair, decode, asked)
        worker, place = decodes[chosen], places[chosen]
        held, tokens = cached_tokens(worker, request), request.prompt_tokens
        granted = NO_LIMIT
        if not place.has_host:
            granted = granted_tokens(place, self._fit_of(worker, asked), tokens - held, held, left_s)
        cost = replace(pair.cost, decode_cached_tokens=held)
        return replace(pair, decode=worker, cost=cost, local_tokens=min(granted, NO_LIMIT))

    def _least_ready(self, pair: Pair, decode: Worker, asked: _Asked) -> tuple[Pair, PromptPlace]:
        """The pair with the prefill worker that is ready first. Among pinned ones the router has chosen; the streams of
        neutral ones, which it does not see, may leave them little time."""
        able = [pair.prefill]
        able += [
            worker
            for worker in asked.others("prefill")
            if (worker.neutral or pair.prefill.neutral)
            and worker.key != pair.prefill.key
            and worker.reaches(decode)
            and asked.may_mix(worker)
        ]
        known = [pair.cost.cached_tokens, *(cached_tokens(worker, asked.request) for worker in able[1:])]
        places = [self._place(worker, asked, held) for worker, held in zip(able, known, strict=True)]
        first = min(range(len(able)), key=lambda index: places[index].ready_s)
        if first:
            prefill = able[first]
            cost = replace(pair.cost, cached_tokens=known[first])
            queued = self._loads.prefill[prefill.key].queued_tokens
            pair = replace(pair, prefill=prefill, cost=cost, queued_tokens=queued)
        return pair, places[first]

    def _streamed(self, pair: Pair, decode: Worker, asked: _Asked) -> Pair:
        """The pair whose prefill worker computes the prompt, with who decodes. Only neutral workers decode beside the
        prompts that they lean to, so without any of them it is the router's choice."""
        pair, prefill = replace(pair, local_tokens=0), pair.prefill
        stand_ins = [worker for worker in asked.others("prefill") if worker.neutral]
        if prefill.neutral and not stand_ins:
            stand_ins = [prefill]
        if asked.tpot_s is None or not (stand_ins or decode.neutral):
            return pair
        able = [
            worker
            for worker in (*asked.others("decode"), *stand_ins)
            if worker.key != decode.key
            and prefill.reaches(worker)
            and self._has_blocks(worker, asked.request)
            and asked.may_mix(worker)
            and (worker.pool == "decode" or self._is_measured(worker))
        ]
        # Of equal ones the one that has computed the prompt, which hands nothing off.
        able.sort(key=lambda worker: worker.key != prefill.key)
        workers = [decode, *able]
        fit = _step_fit(self._loads.decode[decode.key].fit)
        places = [self._stream_place(worker, asked, fit) for worker in workers]
        chosen = choose_stream(places)
        if chosen is None:
            keeps_it = any(worker.key == prefill.key for worker in able)
            return _kept(pair) if keeps_it else pair
        worker = workers[chosen]
        if worker.key == prefill.key:
            return _kept(pair)
        held = cached_tokens(worker, asked.request)
        return replace(pair, decode=worker, cost=replace(pair.cost, decode_cached_tokens=held))

    def _is_measured(self, worker: Worker) -> bool:
        """Whether a worker's clock knows its steps, or will soon: it does not hold prompts back before. One stream at a
        time measures them."""
        return self._loads.decode[worker.key].fit is not None or not self._streams(worker)[0]

    def _stream_place(self, worker: Worker, asked: _Asked, usual: DecodeStepFit | None) -> StreamPlace:
        """A worker that has not decoded yet is taken for as fast as `usual`, the fit of the router's decode worker."""
        fit = _step_fit(self._loads.decode[worker.key].fit) or usual
        # Late prompts come once there is time for them: behind many a worker with time to spare would look full.
        soon = self._book.promised_before(worker.key, asked.due_s, asked.request.class_rank, asked.now)
        streams, context_tokens = self._streams(worker, soon)
        if fit is None:
            return StreamPlace(None, worker.pool == "decode")
        step_s = fit.step_s(streams + 1, context_tokens + asked.request.prompt_tokens)
        return StreamPlace(step_s, worker.pool == "decode", self._strictest_s(worker, asked))

    def _lends_for(self, decode: Worker, pair: Pair, request: RoutingRequest) -> bool:
        """Whether what a decode worker lacks of the prompt is so much that lent cores would compute it."""
        missing = request.prompt_tokens - cached_tokens(decode, request)
        return missing >= MIN_LENT_TOKENS and self._lends(decode, pair.prefill)

    def _decode_place(self, worker: Worker, pair: Pair, asked: _Asked) -> PromptPlace:
        lends = self._lends_for(worker, pair, asked.request)
        has_host = self._has_host(worker, pair, asked)
        place = self._place(worker, asked, cached_tokens(worker, asked.request), lends=lends and not has_host)
        return replace(place, has_host=has_host)

    def _has_host(self, decode: Worker, pair: Pair, asked: _Asked) -> bool:
        """Whether a decode worker computes the prompt on all cores of its host. That is so for promised streams, which
        its token clock keeps; where the pair's prefill worker would take the cores from such a one, too; and where that
        one has no more of the prompt."""
        peer = self._loads.prefill[pair.prefill.key].host_peer
        if asked.tpot_s is None or peer is None or not peer.has_host:
            return False
        if not self._loads.decode[decode.key].has_host:
            return False
        return cached_tokens(decode, asked.request) + MIN_LENT_TOKENS > pair.cost.cached_tokens

    def _takes_over(self, decode: Worker, pair: Pair, asked: _Asked) -> bool:
        """Whether a decode worker that lends its cores may compute the prompt on its neighbours' instead: none of them
        has a prompt, and it would compute nothing that the prefill worker has. Of neutral workers the others' streams
        may take the cores."""
        if self._has_host(decode, pair, asked):
            return True
        if decode.neutral or pair.prefill.neutral or not asked.is_small:
            return False
        if any(
            each.host_id == decode.host_id and each.key != decode.key and self._has_prompts(each)
            for each in asked.snapshot.workers
        ):
            return False
        return cached_tokens(decode, asked.request) + MIN_LENT_TOKENS > pair.cost.cached_tokens

    def _has_prompts(self, worker: Worker) -> bool:
        """Whether there is any, as far as is booked, reported or expected."""
        prefill, decode = self._loads.prefill.get(worker.key), self._loads.decode.get(worker.key)
        queued = 0 if prefill is None else prefill.queued_tokens
        waiting = 0 if decode is None else decode.waiting_prompt_tokens
        return self._book.has_prompts(worker.key) or queued > 0 or waiting > 0

    def _place(self, worker: Worker, asked: _Asked, held: int, *, lends: bool = False) -> PromptPlace:
        """A worker that has not computed prompts yet is taken for as fast as the router's prefill worker. One that
        `lends` cores counts as alone, with what other coordinators have sent: it is to be in time also where the
        prefill worker gets prompts meanwhile."""
        own, request = self._fit_of(worker, asked), asked.request
        ahead_s = self._book.ahead_s(worker.key, asked.due_s, request.class_rank, own, asked.now)
        if lends:
            ahead_s = max(ahead_s, own.token_s * self._loads.decode[worker.key].waiting_prompt_tokens)
        speedup = 1.0 if lends else max(1.0, self._lent_speedup(worker))
        read_s, work_s = _work_s(worker, request, own, held, speedup)
        ahead_s = max(ahead_s / speedup, read_s)  # a prompt keeps its place while it is read for
        if not worker.decodes:
            return PromptPlace(ahead_s, work_s)
        load, tpot_s = self._loads.decode[worker.key], self._strictest_s(worker, asked)
        soon = self._book.promised_before(worker.key, asked.due_s, request.class_rank, asked.now)
        streams, context_tokens = self._streams(worker, None if worker.neutral else soon)
        fit = _step_fit(load.fit)
        step_s = None if fit is None else fit.step_s(streams + 1, context_tokens + request.prompt_tokens)
        share = share_left(fit, streams, context_tokens, tpot_s, own)
        # Where a neutral worker's answers are decoded has a rule of its own.
        pressure = 0.0 if worker.neutral else pressure_on_streams(step_s, tpot_s)
        return PromptPlace(ahead_s, work_s, share, pressure, lends)

    def _strictest_s(self, worker: Worker, asked: _Asked) -> float | None:
        """The strictest target of the request and of the streams that this coordinator has on a worker: the engine's
        clock keeps all of them."""
        targets_s = self._loads.decode[worker.key].targets_s[:1]
        return min([*targets_s, *([] if asked.tpot_s is None else [asked.tpot_s])], default=None)

    def _streams(self, worker: Worker, promised: int | None = None) -> tuple[int, int]:
        """Streams of a worker and their tokens of context. Those on their way are promised their time already: so many,
        None for all; of requests in flight only those with a first token are streams. The batch of a neutral worker has
        prompts whose answers others decode, too: only its streams count."""
        load = self._loads.decode[worker.key]
        promised = self._book.promised(worker.key) if promised is None else promised
        reported = load.report.streams if load.report.HasField("streams") else load.report.running_requests
        streams = max(load.computed + promised, reported + max(load.sent_requests, promised))
        if not worker.neutral or not load.report.HasField("streams"):
            streams = max(streams, load.batch_requests, load.computed + load.other_requests)
        return streams, load.held_blocks * worker.block_size_tokens

    def _decodes(self, pair: Pair, decode: Worker, asked: _Asked) -> list[Worker]:
        """Decode workers that could compute the prompt: the chosen one, and others that have room for it and that the
        prefill worker reaches, should one of them send the prompt back."""
        others = [
            worker
            for worker in asked.others("decode")
            if worker.key != decode.key
            and pair.prefill.reaches(worker)
            and self._has_blocks(worker, asked.request)
        ]
        return [
            worker
            for worker in (decode, *others)
            # Streams may have a pace where this request has none.
            if asked.may_mix(worker)
            and (worker.paces_prompts or not self._loads.decode[worker.key].targets_s)
            and not (
                self._lends_for(worker, pair, asked.request) and not self._takes_over(worker, pair, asked)
            )
        ]

    def _lends(self, decode: Worker, prefill: Worker) -> bool:
        """Whether a decode worker and the prefill worker compute prompts on each other's cores: the decode worker rests
        for that as long as all of its streams have targets and it has no prompts."""
        load = self._loads.decode[decode.key]
        share = min(load.report.lent_speedup, self._lent_speedup(prefill)) > 0
        one_host = decode.host_id == prefill.host_id != ""
        return share and one_host and len(load.targets_s) == len(load.flights)

    def _lent_speedup(self, worker: Worker) -> float:
        """See `WorkerLoad.lent_speedup`."""
        load = self._loads.prefill.get(worker.key) or self._loads.decode[worker.key]
        return load.report.lent_speedup

    def _has_blocks(self, worker: Worker, request: RoutingRequest) -> bool:
        load = self._loads.decode[worker.key]
        has_slot = load.batch_requests < worker.max_running_requests
        return has_slot and load.free_blocks >= needed_blocks(request, float(worker.block_size_tokens))

    def _fit_of(self, worker: Worker, asked: _Asked) -> PromptFit:
        return self._prompt_fit(worker) or asked.fit

    def _prompt_fit(self, worker: Worker) -> PromptFit | None:
        load = self._loads.prefill.get(worker.key) or self._loads.decode[worker.key]
        report = load.report
        return prompt_fit_of(report.prompt_fit) if report.HasField("prompt_fit") else None


def _kept(pair: Pair) -> Pair:
    """The answer is decoded where its prompt is computed."""
    cost = replace(pair.cost, decode_cached_tokens=pair.cost.cached_tokens, transfer_s=0.0)
    return replace(pair, decode=pair.prefill, cost=cost, local_tokens=NO_LIMIT)


def _work_s(
    worker: Worker, request: RoutingRequest, fit: PromptFit, held: int, speedup: float
) -> tuple[float, float]:
    """Reading what a worker holds below its KV blocks, where that is sooner; and computing what it lacks of the prompt,
    or fetching a part of it where that is sooner. `speedup`: of what it computes, by lent cores."""
    known, read_s = held_prefix(worker, request, fit.token_s / speedup)
    offer, held = request.offer, min(held, known)
    compute_s = fit.chunk_s(request.prompt_tokens - held, held) / speedup
    if offer is None or offer.tokens <= held:
        return read_s, compute_s
    fetch_s = offer.sooner_s(worker, held, fit.chunk_s(offer.tokens - held, held) / speedup)
    if fetch_s is None:
        return read_s, compute_s
    rest_s = fit.chunk_s(request.prompt_tokens - offer.tokens, offer.tokens) / speedup
    return read_s, fetch_s + rest_s


def prompt_fit_of(told: registry_pb2.PromptFit) -> PromptFit:
    """A worker's fit, as its load report has it."""
    return PromptFit(told.base_ms / 1e3, told.token_ms / 1e3, told.pair_ms / 1e3, told.mixing_ms / 1e3)


def _step_fit(told: registry_pb2.DecodeStepFit | None) -> DecodeStepFit | None:
    if told is None:
        return None
    return DecodeStepFit(told.base_ms / 1e3, told.sequence_ms / 1e3, told.context_token_ms / 1e3)
