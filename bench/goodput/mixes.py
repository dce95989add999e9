"""The loads: when requests come, and how long their prompts and answers are. All of it follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from bench.asking import HIGHEST_TOKEN, random_prompt

LONG_TOKENS = 512
"""A prompt of this many tokens is a long one."""
TURNS = 8
"""Most turns of a conversation."""
THINK_S = 6.0
"""Least time between two turns of a conversation."""
FOLLOW_UP = 0.75
"""Chance that an arrival goes on with a conversation, where one is due."""
SYSTEM_TOKENS = 192
"""The beginning that all conversations of a seed share."""


@dataclass(frozen=True)
class LengthClass:
    """Requests of one class: their share, and the lengths of prompts and answers in tokens, drawn evenly between."""

    name: str
    share: float
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


@dataclass(frozen=True)
class LoadMix:
    """`cv`: coefficient of variation of the times between arrivals, which are gamma distributed; 1: Poisson.

    `conversation`: prompts are turns, each the history and a message; classes then hold for messages.
    """

    classes: tuple[LengthClass, ...]
    cv: float = 1.0
    conversation: bool = False


@dataclass(frozen=True)
class PlannedRequest:
    """One request; `at_s` counts from the begin of the run."""

    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int
    kind: str
    """Its class."""


_SHORT, _LONG, _ANSWER = (64, 128), (LONG_TOKENS, 1024), (24, 48)
MIXES = {
    "measured": LoadMix(
        (LengthClass("short", 0.8, _SHORT, _ANSWER), LengthClass("long", 0.2, _LONG, _ANSWER))
    ),
    "prefill-heavy": LoadMix(
        (LengthClass("short", 0.5, _SHORT, _ANSWER), LengthClass("long", 0.5, _LONG, _ANSWER))
    ),
    "decode-heavy": LoadMix(
        (LengthClass("short", 0.8, _SHORT, (96, 192)), LengthClass("long", 0.2, _LONG, (96, 192)))
    ),
    "bursty": LoadMix(
        (LengthClass("short", 0.8, _SHORT, _ANSWER), LengthClass("long", 0.2, _LONG, _ANSWER)), cv=3.0
    ),
    "conversation": LoadMix((LengthClass("turn", 1.0, (32, 96), _ANSWER),), conversation=True),
}


def planned(
    name: str, rate: float, requests: int, seed: int, vocabulary: int = HIGHEST_TOKEN + 1
) -> list[PlannedRequest]:
    """The requests of one run, by arrival, `rate` a second in the mean. No two runs share prompts.

    Tokens are random, below `vocabulary`.
    """
    mix, chance = MIXES[name], random.Random(f"{name} {rate:g} {seed}")
    times = list(_arrivals(chance, rate, mix.cv, requests))
    if mix.conversation:
        return _conversations(chance, mix, times, vocabulary)
    return [_single(chance, mix, at_s, vocabulary) for at_s in times]


def _arrivals(chance: random.Random, rate: float, cv: float, requests: int) -> Iterator[float]:
    shape, at_s = cv**-2, 0.0
    for _ in range(requests):
        at_s += chance.gammavariate(shape, 1 / (shape * rate))
        yield at_s


def _single(chance: random.Random, mix: LoadMix, at_s: float, vocabulary: int) -> PlannedRequest:
    (drawn,) = chance.choices(mix.classes, [prompt_class.share for prompt_class in mix.classes])
    prompt = random_prompt(chance, chance.randint(*drawn.prompt_tokens), vocabulary)
    return PlannedRequest(at_s, tuple(prompt), chance.randint(*drawn.output_tokens), drawn.name)


@dataclass
class _Conversation:
    history: list[int]
    last_s: float
    turns: int = 0


def _conversations(
    chance: random.Random, mix: LoadMix, times: list[float], vocabulary: int
) -> list[PlannedRequest]:
    """Arrivals either go on with a conversation or begin one.

    Answers in a history are random tokens, not those that a server gave: they must be the same for every system. So a
    prefix cache can hold the turns' prompts, not the answers between them.
    """
    (messages,) = mix.classes
    system = random_prompt(chance, SYSTEM_TOKENS, vocabulary)
    under_way: list[_Conversation] = []
    requests = []
    for at_s in times:
        due = [
            conversation
            for conversation in under_way
            if conversation.turns < TURNS and at_s - conversation.last_s >= THINK_S
        ]
        if due and chance.random() < FOLLOW_UP:
            talk, kind = chance.choice(due), "follow-up"
        else:
            talk, kind = _Conversation(list(system), at_s), "opening"
            under_way.append(talk)
        talk.history += random_prompt(chance, chance.randint(*messages.prompt_tokens), vocabulary)
        output_tokens = chance.randint(*messages.output_tokens)
        requests.append(PlannedRequest(at_s, tuple(talk.history), output_tokens, kind))
        talk.history += random_prompt(chance, output_tokens, vocabulary)
        talk.last_s, talk.turns = at_s, talk.turns + 1
    return requests
