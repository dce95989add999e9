"""Drafts by a second, smaller model of the same vocabulary.

Its KV lies in a pool of its own with as many blocks as the first model's, under the same block tables: it needs no
allocator, a sequence that gives up its blocks gives up both, and a block that two sequences share is shared. What it
computes is only ever a guess, so a block whose KV here is missing or of something else costs acceptance, not a token.

A draft is sampled as the answer is: with the parameters, the seed and the position of its sequence. So of a request
with a temperature, too, the guess is the token where both models' distributions agree (Leviathan et al. 2023 accept
with a second draw instead, which would make answers depend on the drafts).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from engine.core.model_runner import ModelRunner, warm_up
from engine.core.types import RowsFailedError, SampledToken, ScheduledSequence
from engine.speculation.drafter import OF_A_MODEL, ComputingDrafter, Draft, DraftRequest
from engine.speculation.row_costs import RowCosts
from splitserve.generation.kv_blocks import blocks_for

_SMOOTHING = 0.2
_SINGLES = 2
"""Up to so many tokens are computed one at a time, as decode rows of all sequences: such steps are captured."""
_WARM_UP = "warm-up"
_WARM_UP_PASSES = 3
"""Of which the fastest counts: the others compiled, or something else computed meanwhile."""
_NO_GUESS = 0


@dataclass(slots=True)
class _Kv:
    """What this model has computed of a sequence: KV of its first `computed` tokens, and of `ahead`, which it guessed
    after them. `named`: leading blocks that are known by their hashes."""

    table_id: int
    computed: int
    named: int
    ahead: tuple[int, ...] = ()


class DraftModel(ComputingDrafter):
    """The draft model behind the interface of drafters."""

    def __init__(
        self,
        runner: ModelRunner,
        vocabulary_size: int,
        take_cores: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`runner` has at least as many blocks, of as many tokens, as the sequences' tables name. Guesses are below
        `vocabulary_size`. `take_cores` is called before anything is computed."""
        self._runner, self._vocabulary_size, self._clock = runner, vocabulary_size, clock
        self._take_cores = take_cores
        self._block_size = runner.layout.block_size_tokens
        self.context_tokens = runner.facts.context_tokens
        self._known: dict[Hashable, _Kv] = {}
        self._content: dict[int, bytes] = {}
        """Hashes of the tokens whose KV is in a block, up to its end."""
        self._costs = RowCosts()
        self._chunk_token_s = self._spent_s = 0.0

    def drafts(self, asked: Sequence[DraftRequest]) -> list[Draft]:
        """See `Drafter.drafts`. A sequence whose KV or logits here are broken guesses wrong: its acceptance tells."""
        self._take_cores()
        guessed: dict[Hashable, list[int]] = {each.key: [] for each in asked}
        going = list(asked)
        for each in going:
            if (behind := self.behind(each)) > _SINGLES:
                self.catch_up(each, behind)
        while late := [each for each in going if self._known[each.key].computed < len(each.token_ids) - 1]:
            for each in late:
                self._forget_content(each, computed := self._known[each.key].computed, computed + 1)
            self._decode([self._row(each, (), sample=False) for each in late])
            for each in late:
                self._known[each.key].computed += 1
        for each in going:
            self._name_blocks(each)
        while going:
            tokens = self._decode([self._row(each, guessed[each.key], sample=True) for each in going])
            further = []
            for each, token in zip(going, tokens, strict=True):
                usable = token is not None and token.token_id < self._vocabulary_size
                guessed[each.key].append(token.token_id if token is not None and usable else _NO_GUESS)
                if usable and len(guessed[each.key]) < each.most:
                    further.append(each)
            self._keep(going, guessed)
            going = further
        return [Draft(guessed[each.key], OF_A_MODEL) for each in asked]

    def behind(self, request: DraftRequest) -> int:
        """See `ComputingDrafter.behind`."""
        kv = self._known.get(request.key)
        if kv is None or kv.table_id != request.table_id:  # new, or preempted meanwhile
            found = self._found(request)
            kv = self._known[request.key] = _Kv(request.table_id, found * self._block_size, found)
        last = len(request.token_ids) - 1
        for token in kv.ahead:
            if kv.computed >= last or request.token_ids[kv.computed] != token:
                break
            kv.computed += 1
        kv.ahead = ()
        kv.computed = min(kv.computed, last)
        return last - kv.computed

    def catch_up(self, request: DraftRequest, tokens: int) -> None:
        """See `ComputingDrafter.catch_up`."""
        kv = self._known[request.key]
        self._take_cores()
        self._forget_content(request, kv.computed, kv.computed + tokens)
        chunk = self._row(request, (), sample=False)._replace(num_new=tokens)
        began_s = self._clock()
        with suppress(RowsFailedError):  # its guesses will be wrong, or fail as well
            self._runner.execute([chunk])
        seconds = self._clock() - began_s
        self._spent_s += seconds
        known = self._chunk_token_s or seconds / tokens
        self._chunk_token_s = known + (min(seconds / tokens, 4 * known) - known) * _SMOOTHING
        kv.computed += tokens
        self._name_blocks(request)

    def token_s(self, sequences: int) -> float:
        """See `ComputingDrafter.token_s`."""
        return self._costs.step_s(sequences)

    def chunk_s(self, tokens: int) -> float:
        """See `ComputingDrafter.chunk_s`."""
        return tokens * self._chunk_token_s

    def forget_times(self) -> None:
        """See `ComputingDrafter.forget_times`."""
        self._costs, self._chunk_token_s = RowCosts(), 0.0

    def take_spent_s(self) -> float:
        """See `ComputingDrafter.take_spent_s`."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def forget(self, key: Hashable) -> None:
        """See `Drafter.forget`. Blocks that are known by their hashes stay so."""
        self._known.pop(key, None)

    def forget_kv(self) -> None:
        """See `Drafter.forget_kv`."""
        self._known.clear()
        self._content.clear()

    def warm_up(self, sequences: int) -> None:
        """Computes a prompt and guesses for up to so many sequences, in blocks that nobody owns yet: compiles and
        allocates early, and measures first times."""
        count = warm_up(self._runner, None)
        if count < 2:
            return
        blocks = range(blocks_for(count, self._block_size))
        request = DraftRequest(_WARM_UP, [0] * count, 1, 1, block_ids=blocks, table_id=-1)
        self.catch_up(request, self.behind(request))
        passes = [self._passed(request, sequences) for _ in range(_WARM_UP_PASSES)]
        self._costs = RowCosts()
        for rows, seconds in enumerate(map(min, zip(*passes, strict=True)), start=1):
            self._costs.record(rows, seconds)
        self.forget(_WARM_UP)
        self.take_spent_s()

    def close(self) -> None:
        """Closes the runner."""
        self._runner.close()

    def _passed(self, request: DraftRequest, sequences: int) -> list[float]:
        """Seconds of a guess for each number of sequences."""
        found = []
        for rows in range(1, sequences + 1):
            began_s = self._clock()
            self._decode([self._row(request, (), sample=True)] * rows)
            found.append(self._clock() - began_s)
        return found

    def _decode(self, rows: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        """The tokens of rows of one token each; None for those that fail."""
        began_s = self._clock()
        try:
            tokens = self._runner.execute(rows)
        except RowsFailedError as error:
            tokens = [None] * len(rows)
            if kept := [index for index in range(len(rows)) if index not in error.rows]:
                for index, token in zip(kept, self._decode([rows[index] for index in kept]), strict=True):
                    tokens[index] = token
            return tokens
        seconds = self._clock() - began_s
        self._spent_s += seconds
        self._costs.record(len(rows), seconds)
        return tokens

    def _row(self, request: DraftRequest, guessed: Sequence[int], *, sample: bool) -> ScheduledSequence:
        kv, sampling = self._known[request.key], request.sampling
        tokens: Sequence[int] = [*request.token_ids, *guessed] if guessed else request.token_ids
        return ScheduledSequence(
            request_id=f"draft-{request.table_id}",
            token_ids=tokens,
            prompt_tokens=request.prompt_tokens,
            num_computed=len(tokens) - 1 if sample else kv.computed,
            num_new=1,
            block_ids=request.block_ids,
            sample=sample,
            sampling=replace(sampling, logprobs=None) if sampling.logprobs is not None else sampling,
            table_id=request.table_id,
        )

    def _keep(self, asked: Sequence[DraftRequest], guessed: dict[Hashable, list[int]]) -> None:
        """After a step of guesses: what has KV is the whole sequence, and all guesses before the newest."""
        for each in asked:
            kv, last = self._known[each.key], len(each.token_ids) - 1
            if kv.computed == last:
                self._forget_content(each, last, last + each.most)
                kv.computed = last + 1
            kv.ahead = tuple(guessed[each.key][:-1])

    def _found(self, request: DraftRequest) -> int:
        """Leading blocks whose KV is here already: of an earlier answer, or of another sequence with that prefix."""
        usable = (len(request.token_ids) - 1) // self._block_size
        count = 0
        for block, block_hash in zip(request.block_ids[:usable], request.block_hashes, strict=False):
            if self._content.get(block) != block_hash:
                break
            count += 1
        return count

    def _name_blocks(self, request: DraftRequest) -> None:
        kv = self._known[request.key]
        full = min(kv.computed // self._block_size, len(request.block_hashes))
        for index in range(kv.named, full):
            self._content[request.block_ids[index]] = request.block_hashes[index]
        kv.named = max(kv.named, full)

    def _forget_content(self, request: DraftRequest, begin: int, end: int) -> None:
        """Positions `begin`..`end` - 1 are about to be overwritten."""
        first, last = begin // self._block_size, (end - 1) // self._block_size
        for block in request.block_ids[first : last + 1]:
            self._content.pop(block, None)
