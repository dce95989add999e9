"""Who computes a prompt with a target, and who decodes its answer. Pure.

    ready(w) = (work ahead + own work) / share(w)        left = 0.9 (due - now)

A decode worker that `has_host`, all cores of its host, the prefill worker's too, computes the prompt; of several the
one that is ready first. Such a pair is one machine, with one token clock and one triage. Else

0. a decode worker that shares its cores with the prefill worker, both pinned, where no neighbour has a prompt, the step
   stays within the 0.72 of rule 2, and it is in time on its own cores: it computes on all, mixes with its streams, and
   hands nothing off. Otherwise it computes none of what its cores would compute for the prefill worker;
1. the prefill worker, if it is ready within 0.3 of what is left: prompts on decode workers cost their streams;
2. else the decode worker that is ready first, if it is in time, though the prefill worker be sooner; of those that are
   less pressed than the prefill worker, and where a step with this stream and those that join before the prompt is due
   takes at most 0.72 of 0.9 of the TPOT target;
3. else the prefill worker, if it is in time; else that decode worker if it takes 30% less, else the prefill worker.

So the fixed split (a prefill worker that is always in time) and colocated workers (one that never is) are two results
of one rule. A prefill worker is pressed by what ready(p) is of what is left, a decode worker by what that step is of
0.9 of the TPOT target: time goes from the side that has more of it. `share` is what streams leave of a worker's time;
its token clock keeps them whatever is believed here.
See docs/decisions/0028-who-computes-a-prompt.md and 0090 (rule 0). With neutral workers "prefill" and "decode" are
where they lean, and

4. the answer of a prompt that the prefill worker computes is decoded where the clock has room for it: by the router's
   choice, else by the decode-leaning worker of the shortest step, else by any neutral one, the one that has computed
   the prompt included; where nobody has room, by that one: its clock holds prompts back, not streams. A step takes at
   most 1.05 of 0.9 of the TPOT target on those that lean to decode, 0.85 on others.

See docs/decisions/0036-who-moves-leanings.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.pacing.step_time_fit import DecodeStepFit, PromptFit
from engine.pacing.token_clock import MIN_CHUNK_TOKENS

MARGIN = 0.9
"""Share of the time that is left, and of a stream's target, that plans use."""
ROOM_SHARE = 0.85
"""Of what plans use of a stream's target: as long may a step be that takes one more stream in."""
FULL_SHARE = 1.05
"""The same for a worker that leans to decode: one more stream costs it little, and the first one elsewhere takes the
price of its steps from all prompts there."""
MIX_SHARE = 0.72
"""The same for a decode worker that is to compute a prompt: prompts make its streams last longer, so that more of them
meet there, and those that join while the prompt waits take the rest of the time."""
SOON_SHARE = 0.3
SOONER_SHARE = 0.7
LEAST_SHARE = 0.01
"""A worker whose streams leave nothing is not infinitely far away: its clock gives prompts a little in any case."""


@dataclass(frozen=True, slots=True)
class PromptPlace:
    """A worker that could compute the prompt. Seconds."""

    ahead_s: float
    """Work of prompts that are served before this one."""
    work_s: float
    """Of this prompt: what the worker's cache lacks of it."""
    share: float = 1.0
    """Of its time, what its streams leave to prompts; above 0."""
    pressure: float = 0.0
    """Of a step with its streams, all that join soon and this one, over what their strictest target allows; 0: it has
    no streams with targets, nothing is known, or its streams are not to be spared."""

    lends: bool = False
    """Whether this decode worker lends the prefill worker its cores. It is in question at all while rule 0 allows."""
    has_host: bool = False
    """Whether this decode worker computes on all cores of its host, the prefill worker's too."""

    @property
    def ready_s(self) -> float:
        """From now until the first token."""
        return (self.ahead_s + self.work_s) / self.share

    @property
    def has_room(self) -> bool:
        """Whether its streams leave enough to hold a prompt and its answer; see MIX_SHARE."""
        return self.pressure <= MIX_SHARE


def share_left(
    fit: DecodeStepFit | None,
    streams: int,
    context_tokens: int,
    tpot_s: float | None,
    prompts: PromptFit,
) -> float:
    """What `streams` with so many tokens of context together, the strictest due a token every `tpot_s`, leave of the
    time: it is the pace of all, since a batch has one step.

    1 without streams, without a target, or while steps are unknown.

    Every chunk has a price beside its tokens (`base_s`, `mixing_s`). One chunk takes what a step leaves; where that is
    less than the least chunk takes, the clock saves up for one, and all chunks are of that size.
    """
    if not streams or tpot_s is None or fit is None:
        return 1.0
    period_s = MARGIN * tpot_s
    left_s = period_s - fit.step_s(streams, context_tokens)
    if left_s <= 0:
        return LEAST_SHARE
    price_s = prompts.base_s + prompts.mixing_s
    least_s = prompts.chunk_s(MIN_CHUNK_TOKENS, 0) + prompts.mixing_s
    of_tokens_s = max(left_s - price_s, left_s * (least_s - price_s) / least_s)
    return max(LEAST_SHARE, of_tokens_s / period_s)


def choose_place(prefill: PromptPlace, decodes: Sequence[PromptPlace], left_s: float) -> int | None:
    """The index of the decode worker that computes the prompt, None for the prefill worker.

    `left_s`: until the first token is due; at most 0 for one that is late.
    """
    alone = [index for index, place in enumerate(decodes) if place.has_host]
    if alone:
        return min(alone, key=lambda index: decodes[index].ready_s)
    left_s *= MARGIN
    prefill_s = prefill.ready_s
    lending = [index for index, place in enumerate(decodes) if place.lends and place.has_room]
    if lending:
        first = min(lending, key=lambda index: decodes[index].ready_s)
        if decodes[first].ready_s <= left_s:
            return first
    if prefill_s <= SOON_SHARE * left_s or not decodes:
        return None
    pressed = prefill_s / left_s if prefill_s < left_s else 1.0
    able = [
        index
        for index, place in enumerate(decodes)
        if not place.lends and place.has_room and place.pressure < pressed
    ]
    if not able:
        return None
    first = min(able, key=lambda index: decodes[index].ready_s)
    decode_s = decodes[first].ready_s
    if decode_s <= left_s:
        return first
    if prefill_s <= left_s:
        return None
    return first if decode_s <= SOONER_SHARE * prefill_s else None


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """A worker that could decode the answer."""

    step_s: float | None
    """Its step with this stream and all that are promised to it, seconds; None: unknown."""
    leans_here: bool = True
    """Whether it leans to decode."""
    tpot_s: float | None = None
    """The strictest target of its streams and this one; None: there is none."""

    @property
    def has_room(self) -> bool:
        """Whether its streams and one more keep their targets, as far as is known."""
        if self.step_s is None or self.tpot_s is None:
            return True
        share = FULL_SHARE if self.leans_here else ROOM_SHARE
        return self.step_s <= share * MARGIN * self.tpot_s


def pressure_on_streams(step_s: float | None, tpot_s: float | None) -> float:
    """What a step is of the time that plans give it; 0 where it is unknown or there is no target."""
    return 0.0 if step_s is None or tpot_s is None else step_s / (MARGIN * tpot_s)


def choose_stream(places: Sequence[StreamPlace]) -> int | None:
    """The index of the worker that decodes the answer; None: nobody has room. The first one, which is the router's
    choice, takes it if it has; then those that lean to decode, then the others, each by the shortest step."""
    able = [index for index, place in enumerate(places) if place.has_room]
    if not able or able[0] == 0:
        return able[0] if able else None
    return min(able, key=lambda index: (not places[index].leans_here, places[index].step_s or 0.0))


def granted_tokens(place: PromptPlace, fit: PromptFit, tokens: int, cached: int, left_s: float) -> int:
    """Prompt tokens that a decode worker may compute itself: at least the `tokens` that it is thought to lack, and
    more, if its cache has lost some, as far as they fit into what is left."""
    room_s = MARGIN * left_s * place.share - place.ahead_s
    return max(tokens, fit.tokens_within(room_s, cached))
