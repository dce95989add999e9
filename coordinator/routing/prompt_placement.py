"""Applies `pair_choice` to the registered workers: their fits and streams as reported, their prompts as booked here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from coordinator.routing.local_prefill import NO_LIMIT
from coordinator.routing.pair_choice import PromptPlace, choose_place, granted_tokens, share_left
from coordinator.routing.prompt_book import PromptBook
from coordinator.routing.router import Pair, RoutingRequest, cached_tokens
from coordinator.routing.scores import needed_blocks
from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.snapshot import PoolSnapshot, Worker
from engine.pacing.step_time_fit import DecodeStepFit, PromptFit
from splitserve.v1 import registry_pb2

MAX_DECODES = 64
"""Decode workers that are looked at; of larger pools only the one that the router has chosen."""


class PromptPlacement:
    """Decides with the pair who computes the prompt, where the request has a target and the workers are measured."""

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
        """The pair with `local_tokens`, and with another decode worker if that one computes the prompt; unchanged if
        there is nothing to decide by. `due_s`: when the first token is due, infinity for never; `tpot_s`: what streams
        are promised."""
        fit = self._prompt_fit(pair.prefill)
        if pair.decode is None or fit is None or due_s == float("inf"):
            return pair

        def ahead_s(worker: Worker, own: PromptFit) -> float:
            return self._book.ahead_s(worker.key, due_s, request.class_rank, own, now)

        tokens, cached = request.prompt_tokens, pair.cost.cached_tokens
        prefill = PromptPlace(ahead_s(pair.prefill, fit), fit.chunk_s(tokens - cached, cached))
        decodes = self._decodes(pair, pair.decode, request, snapshot, tpot_s)
        places = [self._place(worker, request, tpot_s, fit, ahead_s) for worker in decodes]
        left_s = due_s - now
        chosen = choose_place(prefill, places, left_s)
        if chosen is None:
            return replace(pair, local_tokens=0)
        worker, place = decodes[chosen], places[chosen]
        held = cached_tokens(worker, request)
        own_fit = self._prompt_fit(worker) or fit
        granted = granted_tokens(place, own_fit, tokens - held, held, left_s)
        cost = replace(pair.cost, decode_cached_tokens=held)
        return replace(pair, decode=worker, cost=cost, local_tokens=min(granted, NO_LIMIT))

    def _place(
        self,
        worker: Worker,
        request: RoutingRequest,
        tpot_s: float | None,
        prefill_fit: PromptFit,
        ahead_s: Callable[[Worker, PromptFit], float],
    ) -> PromptPlace:
        """A decode worker that has not computed prompts yet is taken for as fast as the prefill worker."""
        fit, held = self._prompt_fit(worker) or prefill_fit, cached_tokens(worker, request)
        load = self._loads.decode[worker.key]
        context_tokens = load.held_blocks * worker.block_size_tokens
        # Those in flight too: streams on their way here are promised their time already.
        streams = max(load.batch_requests, load.requests)
        share = share_left(_step_fit(load.fit), streams, context_tokens, tpot_s, fit)
        return PromptPlace(ahead_s(worker, fit), fit.chunk_s(request.prompt_tokens - held, held), share)

    def _decodes(
        self,
        pair: Pair,
        decode: Worker,
        request: RoutingRequest,
        snapshot: PoolSnapshot,
        tpot_s: float | None,
    ) -> list[Worker]:
        """Decode workers that could compute the prompt: the chosen one, and others that have room for it and that the
        prefill worker reaches, should one of them send the prompt back. None that would let prompts hold up streams
        that are promised their time, and none that has failed the request."""
        chosen, others = [decode], []
        if len(snapshot.workers) <= MAX_DECODES:
            others = [
                worker
                for worker in snapshot.accepting(request.model, "decode")
                if worker.key != decode.key
                and pair.prefill.reaches(worker)
                and self._has_room(worker, request)
            ]
        return [
            worker
            for worker in (*chosen, *others)
            if worker.key not in request.exclude and (tpot_s is None or worker.paces_prompts)
        ]

    def _has_room(self, worker: Worker, request: RoutingRequest) -> bool:
        load = self._loads.decode[worker.key]
        has_slot = load.batch_requests < worker.max_running_requests
        return has_slot and load.free_blocks >= needed_blocks(request, float(worker.block_size_tokens))

    def _prompt_fit(self, worker: Worker) -> PromptFit | None:
        pool = self._loads.prefill if worker.pool == "prefill" else self._loads.decode
        report = pool[worker.key].report
        return _fit_of(report.prompt_fit) if report.HasField("prompt_fit") else None


def _fit_of(told: registry_pb2.PromptFit) -> PromptFit:
    return PromptFit(told.base_ms / 1e3, told.token_ms / 1e3, told.pair_ms / 1e3, told.mixing_ms / 1e3)


def _step_fit(told: registry_pb2.DecodeStepFit | None) -> DecodeStepFit | None:
    if told is None:
        return None
    return DecodeStepFit(told.base_ms / 1e3, told.sequence_ms / 1e3, told.context_token_ms / 1e3)
